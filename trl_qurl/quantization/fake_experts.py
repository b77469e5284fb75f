"""Experts that compute with rounded weights and inputs, like the linear layers of `fake_quantization`."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trl_qurl.quantization.checkpoint_form import CheckpointForm, parameter_name
from trl_qurl.quantization.experts import expert_modules, split_experts
from trl_qurl.quantization.formats import gpu_capability
from trl_qurl.quantization.scheme import QuantizationScheme


class QuantizedExperts(nn.Module):
    """Quantized forward pass of transformers' experts, one after the other, without a gradient.

    As with `QuantizedLinear`, an existing module only changes its class.
    """

    scheme: QuantizationScheme
    rounds_inputs: bool  # whether the engine's kernels round them
    exact_class: type[nn.Module]

    def forward(self: Any, hidden_states: torch.Tensor, selected: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Compute the weighted sum of the selected experts' outputs for each token.

        Args:
            hidden_states: Inputs, (T, in).
            selected: Experts of each token, (T, k).
            shares: Their weights in the sum, (T, k).

        Returns:
            Outputs, (T, in).
        """
        result = torch.zeros_like(hidden_states)
        for index, parts in enumerate(self._matrices()):
            tokens, slots = torch.where(selected == index)
            if not len(tokens):
                continue
            hidden = self._rounded_inputs(hidden_states[tokens])
            up = nn.functional.linear(hidden, parts["up_proj.weight"], parts.get("up_proj.bias"))
            if self.has_gate:
                gate = nn.functional.linear(hidden, parts["gate_proj.weight"], parts.get("gate_proj.bias"))
                halves = torch.cat([gate, up], -1) if self.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
                inner = self._apply_gate(halves)
            else:
                inner = self.act_fn(up)
            inner = self._rounded_inputs(inner)
            out = nn.functional.linear(inner, parts["down_proj.weight"], parts.get("down_proj.bias"))
            result.index_add_(0, tokens, (out * shares[tokens, slots, None]).to(result.dtype))
        return result

    def _rounded_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scheme.quantize_activations(inputs) if self.rounds_inputs else inputs

    def _matrices(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield each expert's parts, with rounded weights."""
        parts = [
            dict(split_experts(self, name, parameter.detach()))
            for name, parameter in self.named_parameters(recurse=False)
        ]
        tensors = {name: tensor for entries in parts for name, tensor in entries.items()}
        for index in range(len(self.down_proj)):  # type: ignore[arg-type]
            own = {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{index}.")}
            yield {name: self._rounded(name, own) if name.endswith("weight") else t for name, t in own.items()}

    def _rounded(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        layers = {f"expert.{part.removesuffix('.weight')}": t for part, t in parts.items() if part.endswith("weight")}
        companions = [layers[x] for x in self.scheme.companions(f"expert.{name.removesuffix('.weight')}", layers)]
        weight = parts[name].contiguous()
        tensors = self.scheme.in_engine(self.scheme.quantize(weight, companions), weight.dtype)
        return self.scheme.dequantize(tensors).to(weight.dtype)


@contextmanager
def quantized_experts(model: nn.Module, layers: Collection[str], scheme: QuantizationScheme) -> Iterator[None]:
    """Run the listed experts quantized inside the context."""
    form = CheckpointForm(model)
    changed: list[Any] = []
    for path, experts in expert_modules(model):
        stored = form.layout[f"{parameter_name(path)}.down_proj"]
        if next(iter(stored)).removesuffix(".weight") in layers:
            changed.append(experts)
            experts.scheme, cls = scheme, type(experts)
            experts.rounds_inputs = scheme.rounds_activations(gpu_capability())
            experts.__class__ = type(f"Quantized{cls.__name__}", (QuantizedExperts, cls), {"exact_class": cls})
    try:
        yield
    finally:
        for experts in changed:
            experts.__class__ = experts.exact_class
