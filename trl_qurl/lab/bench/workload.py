"""The user's training step, the measurements that predict it,
and whether it fits on this device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trl_qurl.lab.comparison import label, option

TRAINING = "training"
BUDGET = 60.0
"""Time limit in seconds for each kind of measurement: completions, scoring, updates. The rest is
extrapolated.
"""

REPEATS = 3
SHORT = 8
"""Length of the first completions, from which we estimate the longest that the budget allows."""

ENGINE_SHARE = 0.3  # share of a GPU for an engine that runs beside a trainer: TRL's default
WHOLE_SHARE = 0.9  # share of a GPU for an engine alone
# share for activations; if it is too small, training fails, but the engine's costs remain valid
SPARE = 0.1
TRAINED = 16  # bytes per trained parameter: 32-bit weight, gradient, and the two moments of AdamW
FROZEN = 4  # bytes per frozen parameter: only the weight


@dataclass(frozen=True)
class Workload:
    """One rollout in one process, and the updates from it."""

    prompt_len: int = option(256, "tokens per prompt")
    completion_len: int = option(512, "tokens per completion")
    batch: int = option(64, "completions per rollout")
    generations: int = option(8, "completions per prompt")
    train_batch: int = option(8, "completions per forward and backward pass")
    updates: int = option(4, "optimizer steps per rollout")
    lora_rank: int = option(0, "train an adapter of this rank on all linear layers, 0 for none")

    def __post_init__(self) -> None:
        for name in (
            "prompt_len",
            "completion_len",
            "batch",
            "generations",
            "train_batch",
            "updates",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive number.")
        if self.completion_len <= SHORT:
            raise ValueError(
                f"completion_len is {self.completion_len}: give more than {SHORT} tokens."
            )
        if self.lora_rank < 0:
            raise ValueError(
                f"lora_rank is {self.lora_rank}: give the rank of an adapter, or 0 for none."
            )
        if self.batch % self.generations:
            raise ValueError(
                f"A batch of {self.batch} completions cannot be divided into groups of "
                f"{self.generations}: make --batch a multiple of --generations."
            )
        if self.batch % (self.train_batch * self.updates):
            raise ValueError(
                f"A batch of {self.batch} completions cannot be split into {self.updates} updates "
                f"with passes of {self.train_batch}: make --batch a multiple of "
                f"{self.train_batch * self.updates}, or change --train-batch or --updates."
            )

    @property
    def length(self) -> int:
        """Tokens of a prompt and its completion."""
        return self.prompt_len + self.completion_len


@dataclass(frozen=True)
class Job:
    """A measurement in one process: of an engine, or of learning from its rollouts."""

    # format of the engine, or formats by pattern, `BASELINE`, or `TRAINING`
    part: str | dict[str, str]
    config_dir: str  # directory with the model's `config.json`
    workload: Workload
    ignore: tuple[str, ...] = ("lm_head",)  # modules to keep in full precision
    # hold the policy in the engine's process; otherwise syncs reuse one tensor per shape
    holds_policy: bool = True
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # extra arguments for `vllm.LLM`

    @property
    def description(self) -> str:
        """The measurement in words."""
        return "scoring and updates" if self.part == TRAINING else f"rollouts in {label(self.part)}"


class Device(NamedTuple):
    """The device that runs a training step."""

    name: str
    memory: int  # bytes: total for a GPU, available for a machine
    is_gpu: bool


def find_device() -> Device:
    """Return the first GPU, or this machine if there is none."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Device(f"the GPU ({properties.name})", properties.total_memory, True)
    import psutil

    return Device("this machine", psutil.virtual_memory().available, False)


def count_parameters(model: Any, lora_rank: int) -> tuple[int, int]:
    """Count the parameters of a policy on the meta device and of
    an adapter on its linear layers.
    """
    from trl_qurl.quantization.layers import ignored_modules, model_layers

    kept = ignored_modules(model, ["lm_head"])
    widths = sum(
        sum(layer.shape) for layer in model_layers(model).values() if not layer.matches(kept)
    )
    return sum(parameter.numel() for parameter in model.parameters()), lora_rank * widths


def why_too_large(
    model: Any, lora_rank: int, device: Device, engine_share: float = ENGINE_SHARE
) -> str | None:
    """Explain why a training step does not fit beside an engine, and what would; return `None` if
    it fits.
    """

    def step_bytes(rank: int) -> int:
        count, adapter = count_parameters(model, rank)
        return FROZEN * count + TRAINED * adapter if rank else TRAINED * count

    count, _ = count_parameters(model, 0)
    engine = engine_share * device.memory if device.is_gpu else 2 * count
    room = (1 - SPARE) * device.memory - engine
    if step_bytes(lora_rank) <= room:
        return None
    return (
        f"A training step of {count / 1e9:.2f} billion parameters needs "
        f"{step_bytes(lora_rank) / 1e9:.0f} GB for weights, gradients and AdamW. With the engine "
        f"and activations, this exceeds the {device.memory / 1e9:.0f} GB of {device.name}, so only "
        "the engine is measured. "
        + (
            "Use --lora-rank 16 to measure a whole step."
            if step_bytes(16) <= room
            else "Use a smaller model."
        )
    )
