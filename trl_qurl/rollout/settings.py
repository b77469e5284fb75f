"""What a trainer's config says about rollouts, as flat values: config objects stop at the trainers."""

from dataclasses import dataclass, field, replace
from typing import Any

from trl_qurl.quantization.scheme import QuantizationScheme


@dataclass(frozen=True)
class RolloutSettings:
    """What the trainer's config says about rollouts."""

    scheme: QuantizationScheme | None  # of the rollout weights; `None` for full precision
    ignore: tuple[str, ...] = ("lm_head",)  # modules kept in full precision; `AUTO` among them adds some
    is_served: bool = False  # whether the engine is a vLLM server
    weight_sync: str = "auto"  # or "stream", "checkpoint", "adapter", "llmcompressor"
    round_base: bool = False  # whether the trainer's frozen base becomes what its codes stand for
    smooths: bool | None = False  # whether activations are smoothed; `None` for where it is known how
    follows_autocast: bool = True  # whether weights are rounded to the trainer's 16-bit type before they are quantized
    checkpoint_dir: str | None = None  # where checkpoints for the engine are written; `None` to choose
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # further arguments of the colocated engine
    weight_metrics_interval: int = 0  # syncs between measurements of the weights; 0 for none
    sync_check_interval: int = 16  # syncs between checks by digest and probe; 0 for none
    sync_probe: bool = True  # whether those checks include the probe
    request_timeout: float = 1800.0  # seconds that a request to a server may take
    max_recoveries: int = 3  # from faults of a server, in a row

    def in_16_bits(self) -> "RolloutSettings":
        """The same without quantization. Then there is nothing to smooth, and llm-compressor has nothing to make."""
        weight_sync = "auto" if self.weight_sync == "llmcompressor" else self.weight_sync
        return replace(self, scheme=None, smooths=False, weight_sync=weight_sync)
