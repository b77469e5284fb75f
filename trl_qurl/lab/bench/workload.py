"""The composition of the user's training step, and the measurements that it takes to predict it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl_qurl.lab.comparison import label

TRAINING = "training"
BUDGET = 60.0
"""Time limit in seconds for each kind of measurement: completions, scoring, updates. The rest is extrapolated."""

REPEATS = 3
SHORT = 8
"""Length of the first completions, from which we estimate the longest that the budget allows."""


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
        lora_rank: Train an adapter of this rank on all linear layers instead of the model; 0 for none.
    """

    prompt_len: int = 256
    completion_len: int = 512
    batch: int = 64
    generations: int = 8
    train_batch: int = 8
    updates: int = 4
    lora_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_len", "completion_len", "batch", "generations", "train_batch", "updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive number.")
        if self.completion_len <= SHORT:
            raise ValueError(f"completion_len is {self.completion_len}: give more than {SHORT} tokens.")
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
    def length(self) -> int:
        """Tokens of a prompt and its completion."""
        return self.prompt_len + self.completion_len


@dataclass(frozen=True)
class Job:
    """A measurement in one process: of an engine, or of learning from its rollouts, which is the same for all formats.

    Attributes:
        part: Format of the engine, `BASELINE` for 16 bits, or `TRAINING`.
        config_dir: Directory with the model's `config.json`.
        workload: The step to predict.
        ignore: Modules to keep in full precision.
        holds_policy: Hold the policy in the engine's process; otherwise syncs reuse one tensor per shape.
        engine_kwargs: Extra arguments for `vllm.LLM`.
    """

    part: str
    config_dir: str
    workload: Workload
    ignore: tuple[str, ...] = ("lm_head",)
    holds_policy: bool = True
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """The measurement in words."""
        return "scoring and updates" if self.part == TRAINING else f"rollouts in {label(self.part)}"
