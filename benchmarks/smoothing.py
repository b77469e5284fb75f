"""What does smoothing take off the mismatch of INT8 rollouts, and does it harm where there is nothing to smooth?

    python benchmarks/smoothing.py
    python benchmarks/smoothing.py --models llama --rollouts 3

Real trainers with real INT8 engines, at a learning rate of 0, so that all rollouts have the same policy: the policy
that the demo starts from, and models of random weights with outliers and without. Outliers leave the function as it
is: a norm's gain is multiplied in a few channels, and the inputs of the layers after it divided.
"""

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from datasets import Dataset
from provenance import provenance, write_record
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback

from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
from trl_qurl.lab.demo.algorithms import build_config
from trl_qurl.lab.demo.algorithms import build_trainer as build_demo
from trl_qurl.lab.demo.run import ENVIRONMENT, prepare_policy
from trl_qurl.lab.mismatch.prompts import BUILT_IN

DEMO = "demo"
PLAIN = " without outliers"
ARMS: dict[str, dict[str, Any]] = {
    "16 bits": {"rollout_quantization": None},
    "int8, not smoothed": {"smooth_activations": False},
    "int8": {},
}
METRICS = ("mismatch/kl_k3", "mismatch/ratio_max", "weights/normalized_quantization_error")
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Half of a 95 % confidence interval in standard errors, by the number of values."""

SETTINGS = {"learning_rate": 0.0, "sync_check_interval": 2, "weight_metrics_interval": 1, "report_to": "none"}


BLOCKS = 12

OUTLIERS = {
    "llama": {
        (3, "input_layernorm"): 40.0,
        (5, "post_attention_layernorm"): 60.0,
        (7, "post_attention_layernorm"): 20.0,
    },
    "qwen3": {
        (0, "post_attention_layernorm"): 30.0,
        (6, "input_layernorm"): 60.0,
        (10, "post_attention_layernorm"): 60.0,
    },
    "granite": {
        (2, "post_attention_layernorm"): 60.0,
        (4, "post_attention_layernorm"): 30.0,
        (9, "input_layernorm"): 30.0,
    },
}
"""By model: the norm and the factor of its outliers."""

CHANNELS = (7, 40, 99)


def build(family: str, has_outliers: bool = True) -> PreTrainedModel:
    """A small model of random weights, with outliers or without."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=100,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.mul_(3.0)  # so that blocks matter as much as the embedding
    for (block, norm), factor in OUTLIERS[family].items() if has_outliers else ():
        inject(model.model.layers[block], norm, factor)
    return model


def inject(block: Any, norm: str, factor: float) -> None:
    """Make the inputs of the layers after a norm large in a few channels, without changing the function."""
    attention, feed_forward = block.self_attn, block.mlp
    fed = (attention.q_proj, attention.k_proj, attention.v_proj)
    if norm == "post_attention_layernorm":
        fed = (feed_forward.gate_proj, feed_forward.up_proj)
    with torch.no_grad():
        for channel in CHANNELS:
            getattr(block, norm).weight[channel] *= factor
            for layer in fed:
                layer.weight[:, channel] /= factor


def save(model: PreTrainedModel, directory: Path) -> None:
    """With a tokenizer of one token per character."""
    characters = ["<pad>", "<eos>", *map(chr, range(32, 127))]
    vocabulary = Tokenizer(models.BPE({token: i for i, token in enumerate(characters)}, [], unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        directory
    )
    model.save_pretrained(directory)


def trainer_of(name: str, arm: dict[str, Any], directory: Path, rollouts: int) -> Any:
    """A trainer that makes rollouts and changes nothing."""
    settings: dict[str, Any] = SETTINGS | arm
    if name == DEMO:
        scheme = settings.pop("rollout_quantization", "int8")
        further = {"max_steps": 4 * rollouts, "logging_steps": 4} | settings
        config = build_config("grpo", scheme, directory / "run", rollouts, 0, **further)
        return build_demo(prepare_policy(Console(file=open(os.devnull, "w"))), config)  # noqa: SIM115
    save(build(name.removesuffix(PLAIN), has_outliers=not name.endswith(PLAIN)), directory / "model")
    config = QuRLGRPOConfig(
        str(directory / "run"),
        objective="tis",
        per_device_train_batch_size=64,
        num_generations=8,
        max_steps=rollouts,
        logging_steps=1,
        max_completion_length=48,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        vllm_gpu_memory_utilization=0.1,
        vllm_engine_kwargs={"enforce_eager": True},
        **settings,
    )
    questions = Dataset.from_dict({"prompt": BUILT_IN})
    trainer = QuRLGRPOTrainer(str(directory / "model"), different_characters, config, train_dataset=questions)
    trainer.remove_callback(PrinterCallback)
    return trainer


def different_characters(completions: list[str], **kwargs: Any) -> list[float]:
    """Any reward will do."""
    return [float(len(set(completion))) for completion in completions]


def measure(name: str, rollouts: int) -> dict[str, dict[str, list[float]]]:
    """What each arm logs, rollout by rollout, the first one left out."""
    found = {}
    for arm, changed in ARMS.items():
        with tempfile.TemporaryDirectory() as directory:
            trainer = trainer_of(name, changed, Path(directory), rollouts)
            trainer.train()
            rows = [row for row in trainer.state.log_history if METRICS[0] in row]
            found[arm] = {metric: [row[metric] for row in rows if metric in row] for metric in METRICS}
            del trainer
            gc.collect()
    return found


def interval(values: list[float]) -> float:
    """Half of a 95 % confidence interval of a mean."""
    return STUDENT[len(values)] * stdev(values) / len(values) ** 0.5 if len(values) in STUDENT else float("nan")


def build_table(results: dict[str, Any]) -> Table:
    """KL in thousandths."""
    table = Table(title="KL(engine ‖ policy) per token, 1e-3 nats", box=box.SIMPLE_HEAD)
    table.add_column("model")
    for arm in ARMS:
        table.add_column(arm, justify="right")
    for name, arms in results.items():
        cells = [arms[arm][METRICS[0]] for arm in ARMS]
        table.add_row(name, *(f"{1e3 * mean(kl):.3g} ± {1e3 * interval(kl):.2g}" for kl in cells))
    return table


def main() -> int:
    """Measure, print the table, and write the figures."""
    names = [*OUTLIERS, *(f"{family}{PLAIN}" for family in OUTLIERS), DEMO]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--rollouts", type=int, default=5, choices=range(2, 11), help="(default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    record = {"benchmark": "smoothing", **provenance(torch.device("cpu"), "trl_qurl")}
    record["results"] = {name: measure(name, args.rollouts) for name in args.models}
    console = Console()
    console.print(build_table(record["results"]))
    console.print(f"Written to {write_record(record, args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
