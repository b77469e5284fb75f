"""Rollout settings as flat values: config objects stop at the trainers. Their defaults are the configs'."""

from dataclasses import dataclass
from typing import Any

from trl_qurl.quantization.scheme import QuantizationScheme


@dataclass(frozen=True)
class RolloutSettings:
    """The rollout settings of a trainer's config."""

    scheme: QuantizationScheme | None  # format of the rollout weights; `None` for full precision
    ignore: tuple[str, ...]  # modules kept in full precision; `AUTO` adds sensitive ones
    is_served: bool  # whether the engine is a vLLM server
    weight_sync: str  # "auto", "stream", "checkpoint", "adapter" or "llmcompressor"
    round_base: bool  # whether to round the trainer's frozen base to its quantized values
    smooths: bool | None  # whether to smooth activations; `None` to do so where supported
    checkpoint_dir: str | None  # where to write checkpoints for the engine; `None` to choose
    engine_kwargs: dict[str, Any]  # extra arguments of the colocated engine
    sync_check_interval: int  # syncs between checks by digest and probe; 0 to disable
    request_timeout: float  # seconds that a request to a server may take
