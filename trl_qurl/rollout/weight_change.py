"""Measure how much of an update survives quantization: Eqs. 13 and 14 of the paper, and the share of changed codes."""

from collections.abc import Mapping

import torch

from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.smoothing import Smoothing


class WeightChangeTracker:
    r"""
    Tracks how quantized layers change between measurements. It keeps copies of their weights and codes on the host.

    $$\frac{\lVert\theta^{t} - \theta^{t-N}\rVert^2}{\lVert\theta^{t-N}\rVert^2} \text{ (Eq. 13)}, \qquad
      \frac{\lVert Q(\theta^t) - \theta^t\rVert^2}{\lVert\theta^t\rVert^2} \text{ (Eq. 14)}$$

    Where $\theta$ are the weights of the quantized layers.

    Args:
        every: Syncs N between measurements (the paper uses 16); 0 disables them.
        scheme: Format of the layers; `None` if they are not quantized.
        smoothing: Scales folded into the observed weights. Updates are measured on the policy's own weights.
    """

    def __init__(
        self, every: int, scheme: QuantizationScheme | None = None, smoothing: Smoothing | None = None
    ) -> None:
        self._every, self._scheme, self._smoothing = every, scheme, smoothing
        self._sync = -1
        self._weights: dict[str, torch.Tensor] = {}  # at the last measurement
        self._codes: dict[str, torch.Tensor] = {}
        self._sums: dict[str, float] = {}

    def begin_sync(self) -> None:
        """Start a new pass over the weights."""
        self._sync += 1
        self._sums = dict.fromkeys(("update", "old_norm", "error", "norm", "flipped", "codes"), 0.0)

    @torch.no_grad()
    def observe(self, layer: str, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Observe one layer without modifying it.

        Args:
            layer: Name of the layer.
            weight: Full-precision weight, (out, in).
            tensors: Its quantized tensors; empty in unquantized rollouts.
        """
        if not self._every or self._sync % self._every:
            return
        scheme, sums = self._scheme, self._sums
        own = self._smoothing.unfolded(layer, weight) if self._smoothing else weight
        if layer in self._weights:
            old = self._weights[layer].to(own.device)
            sums["old_norm"] += _squared_norm(old)
            sums["update"] += _squared_norm(own - old)
        self._weights[layer] = own.to("cpu", copy=True)
        if scheme is None:
            return
        sums["norm"] += _squared_norm(weight)
        sums["error"] += _squared_norm(scheme.dequantize(tensors) - weight)
        codes = scheme.codes(tensors)
        if layer in self._codes:
            sums["flipped"] += (codes != self._codes[layer].to(codes.device)).sum().item()
            sums["codes"] += codes.numel()
        self._codes[layer] = codes.to("cpu", copy=True)

    def end_sync(self) -> dict[str, float]:
        """Return the metrics of the sync that just ended; empty if it was not measured.

        Returns:
            `weights/normalized_quantization_error` at every measurement; after the first, also
            `weights/normalized_update` and `weights/codes_changed_share`.
        """
        sums = self._sums
        ratios = {
            "weights/normalized_quantization_error": (sums["error"], sums["norm"]),
            "weights/normalized_update": (sums["update"], sums["old_norm"]),
            "weights/codes_changed_share": (sums["flipped"], sums["codes"]),
        }
        return {name: part / whole for name, (part, whole) in ratios.items() if whole}


def _squared_norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2
