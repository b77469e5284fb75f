"""What a trainer's config says about rollouts, as flat values: config objects stop at the trainers."""

from dataclasses import dataclass, field
from typing import Any

from trl_qurl.quantization.schemes import QuantizationScheme


@dataclass(frozen=True)
class RolloutSettings:
    """
    What the trainer's config says about rollouts.

    Attributes:
        scheme: Format of the rollout weights; `None` for full precision.
        ignore: Modules kept in full precision.
        is_served: Whether the engine is a vLLM server.
        weight_sync: `"auto"`, `"stream"`, `"checkpoint"` or `"llmcompressor"`.
        checkpoint_dir: Where checkpoints for the engine are written; `None` to choose.
        engine_kwargs: Further arguments of the colocated engine.
        weight_metrics_interval: Syncs between measurements of the weights; 0 for none.
        sync_check_interval: Syncs between checks by digest and probe; 0 for none.
        sync_probe: Whether those checks include the probe.
        request_timeout: Seconds that a request to a server may take.
    """

    scheme: QuantizationScheme | None
    ignore: tuple[str, ...] = ("lm_head",)
    is_served: bool = False
    weight_sync: str = "auto"
    checkpoint_dir: str | None = None
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    weight_metrics_interval: int = 16
    sync_check_interval: int = 16
    sync_probe: bool = True
    request_timeout: float = 1800.0
