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

import short_runs
import torch
from safetensors.torch import load_file
from tiny import tiny_classifier

from trl_qurl.trainers.callbacks import RolloutCallback

CACHE = 2**28
"""Bytes that an engine takes for keys and values, which shows if one is left."""

SETTINGS = {
    "max_steps": 2,
    "vllm_max_model_length": 64,
    "smooth_activations": None,
    "vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_memory_bytes": CACHE},
}
SAVING = {"save_strategy": "steps", "save_steps": 2}
RUNS = {
    "GRPO": ("GRPO", SAVING | {"objective": "truncated_quantized_ratio"}),
    "dynamic sampling": ("GRPO", {"dynamic_sampling": True}),
    "PPO": ("PPO", {"num_generations": 1}),
    "GMPO": ("GMPO", SAVING),
}

scored = []
"""Completions of each call of the reward function."""


def reward(completions, **kwargs):
    scored.append(len(completions))
    return [float(len(set(completion))) for completion in completions]


def rollout_that_fails(trainer):
    """Run out of memory after the rollout was generated and scored, as on a GPU that is too
    small.
    """
    full = torch.OutOfMemoryError("CUDA out of memory")
    with patch.object(trainer, "_get_per_token_logps_and_entropies", side_effect=full):
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            return
    raise AssertionError("the rollout did not fail")


def build(name, directory):
    kind, changes = RUNS[name]
    given = {"callbacks": [RolloutCallback()], "train_dataset": short_runs.texts(32)}
    if kind == "PPO":
        given["value_model"] = tiny_classifier()
    return short_runs.build(directory, kind, None, reward, given, **SETTINGS | changes)


def resident():
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train(name, directory):
    """Build, train and delete a trainer; return what remains in memory."""
    trainer = build(name, directory)
    record = {}
    if name == "GRPO":
        from quantized_gmpo.transform import add_to

        add_to(trainer)
        trainer.model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1.0
    if name == "dynamic sampling":
        rollout_that_fails(trainer)
        scored.clear()
    trainer.train()
    record["scored"] = sum(scored)
    record["history"] = trainer.state.log_history
    if name in ("GRPO", "GMPO"):
        record["checkpoint"] = os.listdir(f"{directory}/checkpoint-2")
        saved = trainer.save_quantized(f"{directory}-int8")
        record["saved"] = os.listdir(saved)
        scales = load_file(f"{saved}/model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]
        record["widest"] = (scales[0] / scales[1:].median()).item()
        config = trainer.vllm_generation.llm.llm_engine.vllm_config
        record["format"] = config.quant_config.quant_format
    held = {"trainer": weakref.ref(trainer), "engine": weakref.ref(trainer.vllm_generation.llm)}
    del trainer
    gc.collect()
    record |= {name: reference() is not None for name, reference in held.items()}
    gc.freeze()  # the next trainer's collections skip these objects until it unfreezes them
    return record | {"resident": resident()}


def main(package, directory):
    sys.path.insert(0, package)
    import quantized_gmpo.objective  # noqa: F401 (adds an objective)
    from quantized_gmpo.config import QuantizedGMPOConfig
    from quantized_gmpo.trainer import QuantizedGMPOTrainer

    short_runs.KINDS["GMPO"] = (QuantizedGMPOTrainer, QuantizedGMPOConfig)
    trainer = build("GRPO", directory)
    # the first is deleted only when the second is there, as in a cell run again
    trainer = build("GRPO", directory)
    gc.collect()
    trainer.train()
    record = {"run again": trainer.state.global_step}
    del trainer
    for name in RUNS:
        record[name] = train(name, f"{directory}/{name}")
    print_record(record)


if __name__ == "__main__":
    main(*sys.argv[1:])
