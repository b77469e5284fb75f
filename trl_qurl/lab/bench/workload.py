"""What a step of the user's training is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BASELINE = "none"
TRAINING = "training"
WITH_ADAPTER = "+LoRA"
"""What follows a format whose engine has the adapter beside its weights."""


@dataclass(frozen=True)
class Workload:
    """One rollout on one process, and the updates made from it.

    Attributes:
        prompt_len: Tokens of a prompt.
        completion_len: Tokens of a completion.
        batch: Completions of a rollout.
        generations: Completions of one prompt.
        train_batch: Completions in one forward and backward pass.
        updates: Optimizer steps per rollout.
        gradient_checkpointing: Whether the backward pass computes activations again (TRL's default).
        lora_rank: Rank of an adapter on all linear layers, which is trained instead of the model; 0 for none.
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
                f"A batch of {self.batch} completions cannot hold groups of {self.generations}: give a batch that is "
                "a multiple of --generations."
            )
        if self.batch % (self.train_batch * self.updates):
            raise ValueError(
                f"A batch of {self.batch} completions cannot be split into {self.updates} updates from passes of "
                f"{self.train_batch}: make it a multiple of {self.train_batch * self.updates}, or change "
                "--train-batch or --updates."
            )

    @property
    def passes(self) -> int:
        """Forward and backward passes per rollout."""
        return self.batch // self.train_batch


@dataclass(frozen=True)
class Job:
    """What one process measures: an engine, or what learning from its rollouts costs.

    Attributes:
        config_dir: Directory with the model's `config.json`.
        scheme: Format of the rollouts; `None` for 16 bits.
        workload: The step to predict.
        budget: Seconds that each kind of measurement may take, roughly.
        ignore: Modules kept in full precision.
        adapter: Whether the engine has the adapter beside its weights, and a sync sends nothing else.
        part: `"engine"`, or `"training"`, which is the same for every format.
        holds_policy: Whether the engine's process holds the policy, too; otherwise a sync reads one tensor of each
            shape again and again.
        engine_kwargs: Further arguments of `vllm.LLM`.
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
        """A word for what is measured: `BASELINE`, a format, or a format with an adapter beside it."""
        return TRAINING if self.part == TRAINING else (self.scheme or BASELINE) + (WITH_ADAPTER * self.adapter)

    @property
    def description(self) -> str:
        """What is measured, in words."""
        rollouts = f"{'16-bit' if self.scheme is None else self.scheme.upper()} rollouts"
        rollouts += " with the adapter beside the weights" if self.adapter else ""
        return "scoring and updates" if self.part == "training" else rollouts
