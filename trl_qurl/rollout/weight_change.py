"""How much of an update survives quantization: Eqs. 13 and 14 of the paper, and the share of codes that changed.

The comparison needs the weights of some syncs ago. They are kept in host memory, never as a second copy on the
accelerator, and compared every few syncs only.
"""

from collections.abc import Mapping

import torch

from trl_qurl.quantization.schemes import QuantizationScheme


class WeightChangeTracker:
    r"""
    Observes quantized layers on their way to the engine.

    $$\frac{\lVert\theta^{t} - \theta^{t-N}\rVert^2}{\lVert\theta^{t-N}\rVert^2} \text{ (Eq. 13)}, \qquad
      \frac{\lVert Q(\theta^t) - \theta^t\rVert^2}{\lVert\theta^t\rVert^2} \text{ (Eq. 14)}$$

    Where $\theta$ are the weights of the quantized layers. The share of changed codes compares a sync with the one
    before it.

    Args:
        every: Syncs N between measurements (the paper uses 16); 0 measures nothing.
        scheme: Format of the layers; `None` where they are not quantized.
    """

    def __init__(self, every: int, scheme: QuantizationScheme | None = None) -> None:
        self.every = every
        self._scheme = scheme
        self._sync = -1
        self._measures = self._precedes_measurement = self.observes = False
        self._weights: dict[str, torch.Tensor] = {}
        self._codes: dict[str, torch.Tensor] = {}
        self._sums: dict[str, float] = {}

    def begin_sync(self) -> None:
        """Start a new pass over the weights."""
        self._sync += 1
        self._measures = self.every > 0 and self._sync % self.every == 0
        self._precedes_measurement = self.every > 0 and (self._sync + 1) % self.every == 0
        self.observes = self._measures or self._precedes_measurement  # whether sync must send everything
        self._sums = dict.fromkeys(("update", "old_norm", "error", "norm", "flipped", "codes"), 0.0)

    @torch.no_grad()
    def observe(self, layer: str, weight: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Observe one layer. Nothing is modified.

        Args:
            layer: Its name.
            weight: Full-precision weight, (out, in).
            tensors: What the scheme made of it; none in unquantized rollouts.
        """
        scheme, sums = self._scheme, self._sums
        if self._measures:
            self._compare_weights(layer, weight)
        if self._measures and scheme is not None:
            sums["norm"] += _squared_norm(weight)
            sums["error"] += _squared_norm(scheme.dequantize(tensors) - weight)
            if layer in self._codes:
                codes = scheme.codes(tensors)
                sums["flipped"] += (codes != self._codes[layer].to(codes.device)).sum().item()
                sums["codes"] += codes.numel()
        if self._precedes_measurement and scheme is not None:
            self._codes[layer] = scheme.codes(tensors).to("cpu", copy=True)

    def _compare_weights(self, layer: str, weight: torch.Tensor) -> None:
        if layer in self._weights:
            old = self._weights[layer].to(weight.device)
            self._sums["old_norm"] += _squared_norm(old)
            self._sums["update"] += _squared_norm(weight - old)
            self._weights[layer].copy_(weight)
        else:
            self._weights[layer] = weight.to("cpu", copy=True)

    def end_sync(self) -> dict[str, float]:
        """Metrics of the sync that has just ended; empty if it was not measured.

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
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).item() ** 2
