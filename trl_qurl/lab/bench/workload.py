"""The composition of the user's training step, and the measurement jobs for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BASELINE = "none"
TRAINING = "training"
WITH_ADAPTER = "+LoRA"
"""Suffix of a format whose engine keeps the adapter unmerged."""


@dataclass(frozen=True)
class Workload:
    """One rollout in one process, and the updates from it.

    Attributes:
        prompt_len: Tokens per prompt.
        completion_len: Tokens per completion.
        batch: Completions per rollout.
        generations: Completions per prompt.
        train_batch: Completions per forward and backward pass.
        updates: Optimizer steps per rollout.
        gradient_checkpointing: Recompute activations in the backward pass (TRL's default).
        lora_rank: Train an adapter of this rank on all linear layers instead of the model; 0 for none.
    """

    prompt_len: int = 256
    completion_len: int = 512
    batch: int = 64
    generations: int = 8
    train_batch: int = 8
    updates: int = 4
    gradient_checkpointing: bool = True
    lora_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_len", "completion_len", "batch", "generations", "train_batch", "updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive number.")
        if self.lora_rank < 0:
            raise ValueError(f"lora_rank is {self.lora_rank}: give the rank of an adapter, or 0 for none.")
        if self.batch % self.generations:
            raise ValueError(
                f"A batch of {self.batch} completions cannot be divided into groups of {self.generations}: make "
                "--batch a multiple of --generations."
            )
        if self.batch % (self.train_batch * self.updates):
            raise ValueError(
                f"A batch of {self.batch} completions cannot be split into {self.updates} updates with passes of "
                f"{self.train_batch}: make --batch a multiple of {self.train_batch * self.updates}, or change "
                "--train-batch or --updates."
            )

    @property
    def passes(self) -> int:
        """Number of forward and backward passes per rollout."""
        return self.batch // self.train_batch


@dataclass(frozen=True)
class Job:
    """A measurement in one process: of an engine, or of learning from its rollouts.

    Attributes:
        config_dir: Directory with the model's `config.json`.
        scheme: Rollout format; `None` for 16 bits.
        workload: The step to predict.
        budget: Approximate time limit in seconds for each kind of measurement.
        ignore: Modules to keep in full precision.
        adapter: Keep the adapter unmerged in the engine and sync nothing else.
        part: `"engine"`, or `"training"`, which is the same for every format.
        holds_policy: Hold the policy in the engine's process; otherwise syncs reuse one tensor per shape.
        engine_kwargs: Extra arguments for `vllm.LLM`.
    """

    config_dir: str
    scheme: str | None
    workload: Workload
    budget: float
    ignore: tuple[str, ...] = ("lm_head",)
    adapter: bool = False
    part: str = "engine"
    holds_policy: bool = True
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the measurement: `TRAINING`, `BASELINE` or a format, with a suffix for an adapter."""
        return TRAINING if self.part == TRAINING else (self.scheme or BASELINE) + (WITH_ADAPTER * self.adapter)

    @property
    def description(self) -> str:
        """The measurement in words."""
        rollouts = f"{'16-bit' if self.scheme is None else self.scheme.upper()} rollouts"
        rollouts += " with an unmerged adapter" if self.adapter else ""
        return "scoring and updates" if self.part == "training" else rollouts
