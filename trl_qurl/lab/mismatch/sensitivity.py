"""Where a mismatch comes from: the KL that each layer's rounding adds, by the trainer's own quantized forward pass.

A layer's worth is the mean of what it adds to a model that is exact otherwise, and what it takes away from one that is
quantized otherwise: the first and the last of the marginal contributions whose mean is Shapley's value. `T` tokens,
`V` entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.mismatch.job import Answer

if TYPE_CHECKING:
    import torch

    from trl_qurl.quantization.schemes import QuantizationScheme


@dataclass(frozen=True)
class Group:
    """Layers that an engine fuses, which are quantized together or not at all.

    Attributes:
        layers: Their names.
        extra_bytes: What they take more in 16 bits than quantized.
        kl_alone: KL where nothing else is quantized, in nats per token.
        kl_weights: The same with exact activations.
        kl_rest: KL where everything else is quantized.
        kl_all: KL where everything is.
    """

    layers: tuple[str, ...]
    extra_bytes: int
    kl_alone: float
    kl_weights: float
    kl_rest: float
    kl_all: float

    @property
    def worth(self) -> float:
        """What the KL falls by if the group stays in 16 bits, in nats per token."""
        return (self.kl_alone + self.kl_all - self.kl_rest) / 2


class Sensitivity:
    """Measures the KL of one model on the same answers with different layers quantized.

    Args:
        model: In full precision.
        scheme: The format.
        layers: Names of the layers that are quantized.
        answers: What is scored.
        most_tokens: Answers after so many tokens are left out; the log-probabilities of all of them are kept.
    """

    def __init__(
        self,
        model: Any,
        scheme: QuantizationScheme,
        layers: Collection[str],
        answers: Iterable[Answer],
        most_tokens: int = 512,
    ) -> None:
        self.model, self.scheme, self.layers = model, scheme, frozenset(layers)
        self.answers: list[Answer] = []
        for answer in answers:
            if answer.tokens and sum(len(other.tokens) for other in self.answers) < most_tokens:
                self.answers.append(answer)
        self._exact = list(self._logps((), scheme))

    def kl(self, layers: Collection[str], exact_activations: bool = False) -> float:
        r"""KL(quantized ‖ exact) with these layers quantized, over the whole vocabulary.

        $$\frac{1}{T} \sum_t \sum_v q_{t,v} \, (\log q_{t,v} - \log p_{t,v})$$

        Args:
            layers: Names of layers.
            exact_activations: Whether only weights are rounded.

        Returns:
            Nats per token.
        """
        scheme = without_activations(self.scheme) if exact_activations else self.scheme
        total, count = 0.0, 0
        for q, p in zip(self._logps(layers, scheme), self._exact, strict=True):
            total += float((q.exp() * (q - p)).sum())
            count += len(q)
        return total / count

    def measure(self, sizes: Mapping[str, int], say: Callable[[str], None] = lambda line: None) -> list[Group]:
        """Measure each group of layers, with three passes each; those that are worth most per byte come first.

        Args:
            sizes: What each layer takes more in 16 bits than quantized, in bytes.
            say: Called with a line about how far it is.
        """
        groups = fused_groups(self.layers)
        kl_all = self.kl(self.layers)
        found = []
        for number, layers in enumerate(groups, start=1):
            if number % 10 == 1:
                say(f"Quantizing layers one by one: {number} of {len(groups)}")
            alone = self.kl(layers)
            weights = self.kl(layers, exact_activations=True)
            rest = self.kl(self.layers - set(layers))
            found.append(Group(layers, sum(sizes[layer] for layer in layers), alone, weights, rest, kl_all))
        return sorted(found, key=lambda group: group.worth / group.extra_bytes, reverse=True)

    def _logps(self, layers: Collection[str], scheme: QuantizationScheme) -> Iterable[torch.Tensor]:
        """Log-probabilities of the vocabulary after each token of each answer but the last, (T, V)."""
        import torch

        from trl_qurl.quantization.fake_quantization import quantized_forward

        with torch.no_grad(), quantized_forward(self.model, layers, scheme) if layers else nullcontext():
            for answer in self.answers:
                tokens = torch.tensor([answer.prompt + answer.tokens], device=self.model.device)
                logits = self.model(input_ids=tokens, logits_to_keep=len(answer.tokens) + 1).logits
                yield logits[0, :-1].float().log_softmax(-1)


def fused_groups(layers: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of layers that an engine fuses, in order: projections with one input, and all experts of a block."""
    from trl_qurl.quantization.schemes.nvfp4 import FUSED

    fused = {name: names[0] for names in FUSED for name in names}
    groups: dict[str, list[str]] = {}
    for layer in sorted(layers, key=_by_depth):
        block, is_expert, _ = layer.partition(".experts.")
        parent, _, own = layer.rpartition(".")
        groups.setdefault(block if is_expert else f"{parent}.{fused.get(own, own)}", []).append(layer)
    return [tuple(group) for group in groups.values()]


def without_activations(scheme: QuantizationScheme) -> QuantizationScheme:
    """The same format for weights, which leaves activations alone."""
    from trl_qurl.quantization.schemes import QuantizationScheme

    kind = type(scheme)
    name, exact = f"{kind.__name__}ForWeights", {"quantize_activations": QuantizationScheme.quantize_activations}
    values = {field.name: getattr(scheme, field.name) for field in fields(scheme) if field.init}
    return type(name, (kind,), exact)(**values)


def within_bytes(groups: Sequence[Group], budget: int) -> list[Group]:
    """The groups to keep in 16 bits for at most so many bytes: by worth per byte, while they fit."""
    kept: list[Group] = []
    for group in groups:
        if group.worth > 0 and group.extra_bytes <= budget - sum(other.extra_bytes for other in kept):
            kept.append(group)
    return kept


def within_kl(groups: Sequence[Group], budget: float, sensitivity: Sensitivity) -> list[Group]:
    """The fewest of the groups, in their order, that leave at most so many nats per token if they stay in 16 bits."""
    low, high = -1, len(groups)  # the first is too few, the second is enough: nothing is quantized then
    while high - low > 1:
        middle = (low + high) // 2
        kept = {layer for group in groups[:middle] for layer in group.layers}
        left = sensitivity.layers - kept
        low, high = (low, middle) if not left or sensitivity.kl(left) <= budget else (middle, high)
    return list(groups[:high])


def _by_depth(layer: str) -> list[Any]:
    """Sorts `layers.10` behind `layers.9`."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in layer.split(".")]
