"""Rollout settings as flat values: config objects stop at the trainers."""

from dataclasses import dataclass, field
from typing import Any

from trl_qurl.quantization.scheme import QuantizationScheme


@dataclass(frozen=True)
class RolloutSettings:
    """The rollout settings of a trainer's config."""

    scheme: QuantizationScheme | None  # format of the rollout weights; `None` for full precision
    ignore: tuple[str, ...] = ("lm_head",)  # modules kept in full precision; `AUTO` adds sensitive ones
    is_served: bool = False  # whether the engine is a vLLM server
    weight_sync: str = "auto"  # or "stream", "checkpoint", "adapter", "llmcompressor"
    round_base: bool = False  # whether to round the trainer's frozen base to its quantized values
    smooths: bool | None = False  # whether to smooth activations; `None` to do so where supported
    checkpoint_dir: str | None = None  # where to write checkpoints for the engine; `None` to choose
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # extra arguments of the colocated engine
    sync_check_interval: int = 16  # syncs between checks by digest and probe; 0 to disable
    request_timeout: float = 1800.0  # seconds that a request to a server may take
