"""Measure how much of an update survives quantization: Eqs. 13 and 14 of the paper, and the share of changed codes.

The comparison needs the weights of an earlier sync. One process keeps them in host memory and compares every few
syncs. It stores float32 weights in 16 bits with stochastic rounding. The error of rounding to nearest exceeds an
update and would hide it (at a learning rate of 1e-6, an error of +540 %). A random error is independent of the update,
so its square can be subtracted (an error of 0.6 % at most for a layer of 16 million weights).
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch

from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.smoothing import Smoothing

logger = logging.getLogger(__name__)

EXACT_BELOW = 2**18  # weights per layer: random errors average out in large ones, and small ones need little memory


class WeightSnapshot(NamedTuple):
    """A weight at an earlier sync."""

    values: torch.Tensor  # in host memory
    norm: float  # squared, before rounding
    error: float  # squared norm of the rounding error


class WeightChangeTracker:
    r"""
    Tracks how quantized layers change between syncs.

    $$\frac{\lVert\theta^{t} - \theta^{t-N}\rVert^2}{\lVert\theta^{t-N}\rVert^2} \text{ (Eq. 13)}, \qquad
      \frac{\lVert Q(\theta^t) - \theta^t\rVert^2}{\lVert\theta^t\rVert^2} \text{ (Eq. 14)}$$

    Where $\theta$ are the weights of the quantized layers. The share of changed codes compares a sync with the
    previous one.

    Args:
        every: Syncs N between measurements (the paper uses 16); 0 disables them.
        scheme: Format of the layers; `None` if they are not quantized.
        measures: Whether this process keeps and compares weights; other ranks only track the schedule.
        smoothing: Scales folded into the observed weights. Updates are measured on the policy's own weights.
    """

    def __init__(
        self,
        every: int,
        scheme: QuantizationScheme | None = None,
        measures: bool = True,
        smoothing: Smoothing | None = None,
    ) -> None:
        self.every = every
        self._smoothing = smoothing
        self._scheme = scheme
        self._is_keeper = measures
        self._sync = -1
        self._measures = self._precedes_measurement = False
        self._weights: dict[str, WeightSnapshot] = {}
        self._codes: dict[str, torch.Tensor] = {}
        self._sums: dict[str, float] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(old.values.nbytes for old in self._weights.values()) + sum(c.nbytes for c in self._codes.values())

    def begin_sync(self) -> None:
        """Start a new pass over the weights."""
        self._sync += 1
        self._measures = self.every > 0 and self._sync % self.every == 0
        self._precedes_measurement = self.every > 0 and (self._sync + 1) % self.every == 0
        self._sums = dict.fromkeys(("update", "old_norm", "error", "norm", "flipped", "codes"), 0.0)

    @torch.no_grad()
    def observe(self, layer: str, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Observe one layer without modifying it.

        Args:
            layer: Name of the layer.
            weight: Full-precision weight, (out, in).
            tensors: Its quantized tensors; empty in unquantized rollouts.
        """
        scheme, sums = self._scheme, self._sums
        if not self._is_keeper:
            return
        if self._measures:
            self._compare_weights(layer, self._smoothing.unfolded(layer, weight) if self._smoothing else weight)
        if self._measures and scheme is not None:
            sums["norm"] += _squared_norm(weight)
            sums["error"] += _squared_norm(scheme.dequantize(tensors) - weight)
            if layer in self._codes:
                codes = scheme.codes(tensors)
                sums["flipped"] += (codes != self._codes.pop(layer).to(codes.device)).sum().item()
                sums["codes"] += codes.numel()
        if self._precedes_measurement and scheme is not None:
            self._codes[layer] = scheme.codes(tensors).to("cpu", copy=True)

    def _compare_weights(self, layer: str, weight: torch.Tensor) -> None:
        if layer in self._weights:
            old = self._weights[layer]
            self._sums["old_norm"] += old.norm
            self._sums["update"] += max(0.0, _squared_norm(weight - old.values.to(weight.device)) - old.error)
        self._weights[layer] = self._snapshot(weight)

    def _snapshot(self, weight: torch.Tensor) -> WeightSnapshot:
        if weight.dtype != torch.float32 or weight.numel() < EXACT_BELOW:
            return WeightSnapshot(weight.to("cpu", copy=True), _squared_norm(weight), 0.0)
        device = weight.device
        generator = self._generators.setdefault(device, torch.Generator(device).manual_seed(0))
        noise = torch.randint(2**16, weight.shape, generator=generator, device=device, dtype=torch.int32)
        # A float32 with 16 trailing zero bits is a bfloat16. Noise below 2^16 makes the rounding unbiased.
        rounded = weight.contiguous().view(torch.int32).add(noise).bitwise_and_(-(2**16)).view(torch.float32)
        return WeightSnapshot(rounded.bfloat16().cpu(), _squared_norm(weight), _squared_norm(weight - rounded))

    def end_sync(self) -> dict[str, float]:
        """Return the metrics of the sync that just ended; empty if it was not measured.

        Returns:
            `weights/normalized_quantization_error` at every measurement; after the first, also
            `weights/normalized_update` and `weights/codes_changed_share`.
        """
        sums = self._sums
        if self._sync == 0 and self._weights:
            logger.info(
                "Weight metrics keep %.3g GB in host memory; weight_metrics_interval=0 turns them off.",
                self.nbytes / 1e9,
            )
        ratios = {
            "weights/normalized_quantization_error": (sums["error"], sums["norm"]),
            "weights/normalized_update": (sums["update"], sums["old_norm"]),
            "weights/codes_changed_share": (sums["flipped"], sums["codes"]),
        }
        return {name: part / whole for name, (part, whole) in ratios.items() if whole}


def _squared_norm(tensor: torch.Tensor) -> float:
    # float64, because squares are subtracted: the rounding error may be a hundred times the update.
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2
