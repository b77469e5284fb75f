"""Lines that require an engine in the trainer's process: it starts, trains, and uses the weights it received."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.doctor.lines import Line, note, ok
from trl_qurl.lab.doctor.policy import PADDED_SIZES, build_policy, build_trainer
from trl_qurl.quantization.formats import parse_scheme

if TYPE_CHECKING:
    from torch import nn

    from trl_qurl import QuRLGRPOTrainer

LIVE_TRAINERS: list[Any] = []
"""Keeps trainers alive until the process ends, which frees their engines more reliably than garbage collection."""


def train_format(name: str) -> Iterator[Line]:
    """Start an engine in a format, train three steps, and report the probe's distances."""
    started = time.perf_counter()
    trainer = build_trainer(parse_scheme(name))
    LIVE_TRAINERS.append(trainer)
    seconds = time.perf_counter() - started
    kernels = engine_kernels(trainer)
    suffix = f" with {', '.join(kernels)}" if kernels else ""
    yield ok(f"engine-{name}", f"started in {seconds:.1f} s{suffix}", kernels=kernels, seconds=seconds)
    yield from _trained(trainer, f"train-{name}", f"probe-{name}")


def train_padded(name: str) -> Iterator[Line]:
    """Train with layer sizes that the engine pads."""
    yield from _variant("padded", name, sizes=PADDED_SIZES)


def train_with_graphs(name: str) -> Iterator[Line]:
    """Train with CUDA graphs, whose storage reloads write into: the probe shows whether they see the new weights."""
    yield from _variant("graphs", name, engine={"enforce_eager": False})


def train_asleep(name: str) -> Iterator[Line]:
    """Train with an engine that frees its memory between rollouts and receives its weights again each time."""
    yield from _variant("sleep", name, vllm_enable_sleep_mode=True)


def train_with_fp8_cache(name: str) -> Iterator[Line]:
    """Train with an FP8 key-value cache, whose scales are always 1."""
    yield from _variant("kv-cache", name, engine={"kv_cache_dtype": "fp8"})


def _variant(line: str, name: str, sizes: dict[str, int] | None = None, **changed: Any) -> Iterator[Line]:
    """Train with one change, and report the result as a single line."""
    trainer = build_trainer(parse_scheme(name), build_policy(**(sizes or {})), **changed)
    LIVE_TRAINERS.append(trainer)
    trained, probed = _trained(trainer, line, line)
    text = f"{name.upper()}: {trained.text}; probe {probed.text}"
    yield (
        note(line, text, probed.advice, **trained.data, **probed.data)
        if probed.advice
        else ok(line, text, **trained.data, **probed.data)
    )


def _trained(trainer: QuRLGRPOTrainer, train_line: str, probe_line: str) -> list[Line]:
    """Train, and report the result in two lines; the trainer raises an exception if a sync fails."""
    trainer.train()
    trainer.vllm_generation.sync_weights()  # sends the weights of the last step
    last = trainer.vllm_generation.pop_weight_metrics()
    rows = [row for row in trainer.state.log_history if "time/sync_s" in row]
    return [describe_training(train_line, rows, len(rows) + 1), describe_probe(probe_line, [*rows, last])]


def describe_training(line: str, rows: list[dict[str, float]], syncs: int) -> Line:
    """Report the mismatch of each step's rollout and the digests at the syncs."""
    kl = [row["mismatch/kl_k3"] for row in rows]
    unchecked = sum(row["time/sync_check_s"] <= 0 for row in rows)
    if not rows or unchecked or not all(math.isfinite(row["loss"]) for row in rows):
        raise RuntimeError(f"{len(rows)} steps were logged, {unchecked} without digests: {rows}")
    text = (
        f"{len(rows)} steps, matching digests at {syncs} syncs, KL between the sampling and the learning policy "
        f"{min(kl):.1e} to {max(kl):.1e} nats"
    )
    return ok(line, text, kl=kl, losses=[row["loss"] for row in rows], sync_s=[row["time/sync_s"] for row in rows])


def describe_probe(line: str, rows: list[dict[str, float]]) -> Line:
    """Report the probe's distances, which the trainer has already checked."""
    distances = [row["sync/probe_distance"] for row in rows if "sync/probe_distance" in row]
    ratios = [row["sync/probe_ratio"] for row in rows if "sync/probe_ratio" in row]
    text = f"{min(distances):.1e} to {max(distances):.1e} nats, at most {max(ratios):.2f} of what rounding explains"
    data = {"distances": distances, "ratios": ratios}
    if max(ratios) > 1:
        advice = (
            "The kernels of this machine may round differently: sync/probe_ratio should stay constant during a run. "
            "Please report it with the output of `trl-qurl doctor --json`, so the tolerance can be adjusted."
        )
        return note(line, f"{text}.", advice, **data)
    return ok(line, text, **data)


def engine_kernels(trainer: QuRLGRPOTrainer) -> list[str]:
    """Return the names of the kernels in the engine's quantized layers."""
    [names] = trainer.vllm_generation.llm.apply_model(_kernel_names)
    return names


def _kernel_names(model: nn.Module) -> list[str]:
    schemes = [scheme for layer in model.modules() if (scheme := getattr(layer, "scheme", None)) is not None]
    parts = [type(part).__name__ for scheme in schemes for part in vars(scheme).values()]
    return sorted({name for name in parts if "Kernel" in name})
