"""What a step is, how much memory it takes, and how many trainers fit beside each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_qurl.lab.comparison import option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trl_qurl.quantization.plan import Formats

IN_TURNS = "steps in turns"
ENGINE_ALONE = "the engine alone, one format after another"
WAYS = [IN_TURNS, "one format after another", ENGINE_ALONE]
"""How to measure: each way needs less memory than the one before."""

ENGINE_SHARE = 0.3  # of a GPU, beside a trainer: TRL's default
SPARE = 0.1  # share of the memory for activations
TRAINED = 16  # bytes per trained parameter: 32-bit weight, gradient, and the two moments of AdamW
FROZEN = 4  # bytes per frozen parameter: only the weight

# Where the host is the limit even of 16-bit rollouts, by calculation (docs/choosing.md). An A30, or
# a part of a GPU, has the capability of a large one, but not its memory.
LARGE_GPUS = ((8, 0), (9, 0))  # A100; H100, H200
LARGE_MEMORY = 39e9  # bytes
SMALL_MODEL = 1.6e9  # parameters
ADVICE = (
    "Calculated, not measured: 8 bits do not pay for a model of this size on this GPU, because the "
    "host is the limit, not the GPU. Expect more of 16-bit rollouts (docs/choosing.md, When 8 bits "
    "pay)."
)


@dataclass(frozen=True)
class Load:
    """One rollout, and the updates from it."""

    prompt_len: int = option(256, "tokens per prompt")
    completion_len: int = option(512, "tokens per completion")
    batch: int = option(64, "completions per rollout")
    train_batch: int = option(8, "completions per forward and backward pass")
    updates: int = option(1, "optimizer steps per rollout")
    lora_rank: int = option(0, "train an adapter of this rank on all linear layers, 0 for none")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            lowest = 0 if name == "lora_rank" else 1
            if value < lowest:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is {value}: give {lowest} or more.")
        divisor = math.lcm(2, self.train_batch * self.updates)
        if self.batch % divisor:
            raise ValueError(
                f"--batch is {self.batch}, but groups of at least two completions, passes of "
                f"{self.train_batch} and {self.updates} updates need a multiple of {divisor}: "
                "change --batch, --train-batch or --updates."
            )

    @property
    def generations(self) -> int:
        """Completions per prompt."""
        return math.gcd(8, self.batch)

    @property
    def length(self) -> int:
        """Tokens of a prompt and its completion."""
        return self.prompt_len + self.completion_len


@dataclass(frozen=True)
class Job:
    """What to measure in one format."""

    model: str  # Hub name or directory
    load: Load
    has_weights: bool  # else they are random
    ignore: list[str]  # modules to keep in full precision
    formats: Formats
    engine: dict[str, Any]  # the trainer's settings of its engine


class Memory(NamedTuple):
    """What a trainer takes, in bytes by calculation, and what its device has."""

    parameters: int  # their number
    training: int  # weights, gradients and AdamW
    engine: int
    device: int  # a whole GPU, or what is free on a machine without one

    def ways(self, trainers: int) -> list[str]:
        """Return the first way to measure so many trainers that fits, and those after it."""
        fitting = int((1 - SPARE) * self.device / (self.training + self.engine))
        if fitting >= trainers:
            return WAYS
        return WAYS[1:] if fitting else WAYS[2:]


def advice(memory: Memory) -> str:
    """Say that 8 bits cannot pay, for a small model on a large GPU; else return an empty string."""
    from trl_qurl.quantization.formats import gpu_capability

    if memory.parameters > SMALL_MODEL or memory.device < LARGE_MEMORY:
        return ""
    return ADVICE if gpu_capability() in LARGE_GPUS else ""


def estimate(model: PreTrainedModel, load: Load, gpu_gb: float) -> Memory:
    """Calculate what training a model on the meta device takes, on a GPU of so many GB.

    0 stands for this machine. Without a GPU, an engine takes its 16-bit weights, and what its
    process takes besides.
    """
    import psutil
    import torch

    from trl_qurl.quantization.layers import ignored_modules, model_layers
    from trl_qurl.rollout.repairs.cpu_memory import ENGINE_BYTES

    count = model.num_parameters()
    training = TRAINED * count
    if load.lora_rank:
        kept = ignored_modules(model, ["lm_head"])
        layers = model_layers(model).values()
        widths = sum(sum(layer.shape) for layer in layers if not layer.matches(kept))
        training = FROZEN * count + TRAINED * load.lora_rank * widths
    device = int(gpu_gb * 1e9)
    if not device and torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0).total_memory
    engine = int(ENGINE_SHARE * device) or 2 * count + ENGINE_BYTES
    return Memory(count, training, engine, device or psutil.virtual_memory().available)
