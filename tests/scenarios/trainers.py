"""Trainers that are built, train and are deleted, one after the other in one process, as in the
cells of a notebook.

Prints, of each, whether it and its engine are gone, and what memory the process holds then.
"""

import gc
import os
import sys
import weakref
from pathlib import Path
from unittest.mock import patch

from child import print_record

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from datasets import Dataset
from safetensors.torch import load_file
from short_runs import BASE
from tiny import tiny_classifier, tiny_model, tiny_tokenizer

from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer, QuRLPPOConfig, QuRLPPOTrainer
from trl_qurl.trainers.callbacks import TrainerAwareCallback

CACHE = 2**28
"""Bytes that an engine takes for keys and values, which shows if one is left."""

KINDS: dict[str, tuple] = {
    "GRPO": (QuRLGRPOTrainer, QuRLGRPOConfig, {}),
    "dynamic sampling": (QuRLGRPOTrainer, QuRLGRPOConfig, {"dynamic_sampling": True}),
    "PPO": (QuRLPPOTrainer, QuRLPPOConfig, {"num_generations": 1}),
}


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


scored: list[int] = []
"""Completions of each call of the reward function."""


def reward(completions, **kwargs):
    scored.append(len(completions))
    return [float(len(set(completion))) for completion in completions]


def rollout_that_fails(trainer) -> None:
    """Run out of memory after the rollout was generated and
    scored, as on a GPU that is too small.
    """
    full = torch.OutOfMemoryError("CUDA out of memory")
    with patch.object(trainer, "_get_per_token_logps_and_entropies", side_effect=full):
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            return
    raise AssertionError("the rollout did not fail")


def build(kind: str, directory: str):
    trainer, config, changes = KINDS[kind]
    settings = BASE | {
        "max_steps": 2,
        "vllm_max_model_length": 64,
        "smooth_activations": None,
        "vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_memory_bytes": CACHE},
        **changes,
    }
    return trainer(
        tiny_model(),
        reward,
        config(directory, **settings),
        train_dataset=Dataset.from_dict(
            {"prompt": [f"{letter}{i}" for letter in "abcdefgh" for i in range(4)]}
        ),
        processing_class=tiny_tokenizer(),
        callbacks=[TrainerAwareCallback()],
        **({"value_model": tiny_classifier()} if kind == "PPO" else {}),
    )


def train(kind: str, directory: str) -> dict[str, object]:
    """Build, train and delete a trainer; return what remains in memory."""
    trainer = build(kind, directory)
    record: dict[str, object] = {}
    if kind == "GRPO":
        from quantized_gmpo.transform import add_to

        add_to(trainer)
        trainer.model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1.0
    if kind == "dynamic sampling":
        rollout_that_fails(trainer)
        scored.clear()
    trainer.train()
    if kind == "dynamic sampling":
        record["scored"] = sum(scored)
    if kind in ("GRPO", "GMPO"):
        record["history"] = trainer.state.log_history
        record["checkpoint"] = os.listdir(f"{directory}/checkpoint-2")
        record["card"] = Path(directory, "README.md").read_text()
    if kind == "GMPO":
        record["format"] = (
            trainer.vllm_generation.llm.llm_engine.vllm_config.quant_config.quant_format
        )
        record["saved"] = os.listdir(trainer.save_quantized(f"{directory}-int8"))
    if kind == "GRPO":
        saved = trainer.save_quantized(f"{directory}-int8")
        scales = load_file(f"{saved}/model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]
        record["widest"] = (scales[0] / scales[1:].median()).item()
    held = {"trainer": weakref.ref(trainer), "engine": weakref.ref(trainer.vllm_generation.llm)}
    del trainer
    gc.collect()
    record |= {name: reference() is not None for name, reference in held.items()}
    gc.freeze()  # the next trainer's collections skip these objects until it unfreezes them
    return record | {"resident": resident()}


def main(package: str, directory: str) -> None:
    sys.path.insert(0, package)
    import quantized_gmpo.objective  # noqa: F401 (adds an objective)
    from quantized_gmpo.config import QuantizedGMPOConfig
    from quantized_gmpo.trainer import QuantizedGMPOTrainer

    saving = {"save_strategy": "steps", "save_steps": 2}
    KINDS["GRPO"] = (
        QuRLGRPOTrainer,
        QuRLGRPOConfig,
        saving | {"objective": "truncated_quantized_ratio"},
    )
    KINDS["GMPO"] = (QuantizedGMPOTrainer, QuantizedGMPOConfig, saving)
    trainer = build("GRPO", directory)
    # the first is deleted only when the second is there, as in a cell run again
    trainer = build("GRPO", directory)
    gc.collect()
    trainer.train()
    record: dict[str, object] = {"run again": {"steps": trainer.state.global_step}}
    del trainer
    record |= {kind: train(kind, f"{directory}/{kind}") for kind in KINDS}
    print_record(record)


if __name__ == "__main__":
    main(*sys.argv[1:])
