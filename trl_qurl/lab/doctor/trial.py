"""A real trial: a tiny random policy, trained for two steps on rollouts in one format. It needs no
download.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch

from trl_qurl.lab.doctor.report import Line, Status

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from trl_qurl import QuRLGRPOTrainer

STEPS = 2  # the second rollout uses weights that the first step changed


def check(form: str, name: str) -> list[Line]:
    """Start an engine and train."""
    started = time.perf_counter()
    trainer = build_trainer(form)
    start_seconds = time.perf_counter() - started
    [kernels] = trainer.vllm_generation.llm.apply_model(_kernel_names)
    return [describe(name, start_seconds, kernels, train(trainer))]


def train(trainer: QuRLGRPOTrainer) -> list[dict[str, float]]:
    """Train, and return the rows of the log. The trainer verifies each sync with digests and the
    probe, and raises.
    """
    trainer.train()
    rows = [row for row in trainer.state.log_history if "time/sync_s" in row]
    if len(rows) < STEPS or not all(
        math.isfinite(row["loss"]) and row["time/sync_check_s"] > 0 for row in rows
    ):
        raise RuntimeError(f"A step has no finite loss, or no digests of its sync: {rows}")
    return rows


def describe(
    name: str, start_seconds: float, kernels: list[str], rows: list[dict[str, float]]
) -> Line:
    """Report the engine, and the worst mismatch and probe of all steps."""
    columns = {
        "kl": "mismatch/kl_k3",
        "probe_distances": "sync/probe_distance",
        "probe_ratios": "sync/probe_ratio",
    }
    data: dict[str, Any] = {key: [row[column] for row in rows] for key, column in columns.items()}
    ratio, advice = max(data["probe_ratios"]), ""
    text = (
        f"engine started in {start_seconds:.0f} s{f' with {kernels[0]}' if kernels else ''}; "
        f"{len(rows)} steps with matching digests, KL of actor and policy up to "
        f"{max(data['kl']):.1e} nats, probe ratio up to {ratio:.2f} (1 is what rounding explains)"
    )
    if ratio > 1:
        advice = (
            "The kernels of this machine may round differently: sync/probe_ratio should stay "
            "constant during a run. Please report it with the output of `trl-qurl doctor --json`, "
            "so the tolerance can be adjusted."
        )
    return Line(
        name, text, Status.NOTE if advice else Status.OK, advice, data | {"kernels": kernels}
    )


def even_tokens(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """Reward function that differs between completions: the share of even token ids."""
    return [
        sum(token % 2 == 0 for token in tokens) / max(1, len(tokens)) for tokens in completion_ids
    ]


def build_policy(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a random policy whose biases are large, as in real ones: zeros would be right in any
    order.

    All quantized layers are multiples of 128, the size of groups, blocks and kernel tiles. All
    attention kernels support heads of 64, and vLLM assumes that they add up to hidden_size.
    """
    from trl_qurl.lab.demo.warm_start import build_model

    model = build_model(tokenizer, seed=0, width=256, layers=2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def build_trainer(
    form: str, policy: PreTrainedModel | None = None, **settings: Any
) -> QuRLGRPOTrainer:
    """Build a trainer that checks every sync with digests and a probe, and start its engine or
    connect to a server.
    """
    from datasets import Dataset

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
    from trl_qurl.lab.demo.task import build_tokenizer, sample_problems
    from trl_qurl.lab.device import full_precision
    from trl_qurl.quantization.plan import read_formats

    # With several GPUs, the trainer would wrap the model for all of them.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    tokenizer = build_tokenizer()
    has_gpu, dtype = torch.cuda.is_available(), full_precision()[1]
    if "vllm_mode" not in settings:
        # Compile as in a real run, except on a CPU, where it takes minutes.
        options = {"dtype": dtype, "enforce_eager": not has_gpu, "kv_cache_memory_bytes": 2**26}
        settings |= {"vllm_max_model_length": 64, "vllm_engine_kwargs": options}
    config = QuRLGRPOConfig(
        output_dir=tempfile.mkdtemp(),  # in the child's temporary directory, which is deleted
        rollout_quantization=read_formats(form),
        sync_check_interval=1,
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=STEPS,
        logging_steps=1,
        bf16=has_gpu and dtype == "bfloat16",
        fp16=has_gpu and dtype == "float16",
        use_cpu=not has_gpu,
        report_to="none",
        **settings,
    )
    return QuRLGRPOTrainer(
        model=policy or build_policy(tokenizer),
        reward_funcs=even_tokens,
        args=config,
        train_dataset=Dataset.from_dict(
            {"prompt": [problem.prompt for problem in sample_problems(64, seed=0)]}
        ),
        processing_class=tokenizer,
    )


def _kernel_names(model: torch.nn.Module) -> list[str]:
    """Return the class names of the kernels in a model's quantized layers."""
    schemes = [
        scheme
        for layer in model.modules()
        if (scheme := getattr(layer, "scheme", None)) is not None
    ]
    parts = [type(part).__name__ for scheme in schemes for part in vars(scheme).values()]
    return sorted({name for name in parts if "Kernel" in name})
