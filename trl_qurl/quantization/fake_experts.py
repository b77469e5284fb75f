"""Experts that compute with rounded weights and inputs, as `fake_quantization` lets linear layers do."""

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
    """A forward pass for experts of transformers, one after the other, without a gradient.

    An existing module gets it by its class alone, as `QuantizedLinear` does.
    """

    scheme: QuantizationScheme
    rounds_inputs: bool  # whether the engine's kernels do
    exact_class: type[nn.Module]

    def forward(self: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Sum what the chosen experts make of each token.

        Args:
            hidden_states: Inputs, (T, in).
            chosen: Experts of each token, (T, k).
            shares: Their weights in the sum, (T, k).

        Returns:
            Outputs, (T, in).
        """
        result = torch.zeros_like(hidden_states)
        for index, parts in enumerate(self._matrices()):
            tokens, place = torch.where(chosen == index)
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
            result.index_add_(0, tokens, (out * shares[tokens, place, None]).to(result.dtype))
        return result

    def _rounded_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scheme.quantize_activations(inputs) if self.rounds_inputs else inputs

    def _matrices(self) -> Iterator[dict[str, torch.Tensor]]:
        """Each expert's parts, its weights rounded."""
        parts = [
            dict(split_experts(self, name, parameter.detach()))
            for name, parameter in self.named_parameters(recurse=False)
        ]
        named = {name: tensor for entries in parts for name, tensor in entries.items()}
        for index in range(len(self.down_proj)):  # type: ignore[arg-type]
            own = {name.partition(".")[2]: t for name, t in named.items() if name.startswith(f"{index}.")}
            yield {name: self._rounded(name, own) if name.endswith("weight") else t for name, t in own.items()}

    def _rounded(self, name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        layers = {f"expert.{part.removesuffix('.weight')}": t for part, t in parts.items() if part.endswith("weight")}
        companions = [layers[x] for x in self.scheme.companions(f"expert.{name.removesuffix('.weight')}", layers)]
        weight = parts[name].contiguous()
        tensors = self.scheme.in_engine(self.scheme.quantize(weight, companions), weight.dtype)
        return self.scheme.dequantize(tensors).to(weight.dtype)


@contextmanager
def quantized_experts(model: nn.Module, layers: Collection[str], scheme: QuantizationScheme) -> Iterator[None]:
    """Let experts that are among the layers compute so inside the block."""
    form = CheckpointForm(model)
    changed: list[Any] = []
    for path, experts in expert_modules(model):
        held = form.held[f"{parameter_name(path)}.down_proj"]
        if next(iter(held)).removesuffix(".weight") in layers:
            changed.append(experts)
            experts.scheme, kind = scheme, type(experts)
            experts.rounds_inputs = scheme.rounds_activations(gpu_capability())
            experts.__class__ = type(f"Quantized{kind.__name__}", (QuantizedExperts, kind), {"exact_class": kind})
    try:
        yield
    finally:
        for experts in changed:
            experts.__class__ = experts.exact_class
