"""How often a mixture of experts sends a token to other experts in the engine than in the trainer.

Routers stay whole, but what they see went through quantized layers. A token that changes its experts changes its
log-probability by a jump, so these models are more sensitive to rounding than dense ones.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trl_qurl.quantization.experts import expert_modules
from trl_qurl.rollout.engine.interface import Routing

RoutedTokens = tuple[list[int], Routing]
"""Token ids, (T,), and what an engine chose for them or for the last of them."""


@torch.no_grad()
def routing_metrics(model: Any, routed: list[RoutedTokens]) -> dict[str, float]:
    r"""Share of tokens and layers for which the engine chooses another set of experts than the full-precision policy.

    $$\frac{1}{|L| \, |T|} \sum_{l, t} [E_{l,t}^{engine} \ne E_{l,t}^{policy}]$$

    Args:
        model: The policy, without PEFT's wrapper.
        routed: Sequences and the engine's experts.

    Returns:
        `sync/routing_disagreement`; nothing if the engine told nothing.
    """
    differing: list[torch.Tensor] = []
    training = model.training
    model.eval()
    try:
        for tokens, routing in routed:
            with _recorded(model) as chosen:
                model(input_ids=torch.tensor([tokens], device=model.device))
            for layer in chosen.keys() & routing.keys():
                theirs = torch.tensor(routing[layer]).sort(-1).values  # (tokens, k)
                ours = chosen[layer][-len(theirs) :].sort(-1).values
                if ours.shape == theirs.shape:  # kernels may pad tokens, or count a shared expert
                    differing.append((ours != theirs).any(-1).float())
    finally:
        model.train(training)
    return {"sync/routing_disagreement": torch.cat(differing).mean().item()} if differing else {}


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Yield what a forward pass fills with the choice of each layer, (tokens, k), by the layer's number."""
    chosen: dict[int, torch.Tensor] = {}

    def record(layer: int) -> Any:
        # Experts are called with hidden states, the chosen ones' numbers, and their weights.
        return lambda module, inputs: chosen.update({layer: inputs[1].cpu()})

    layers = [(re.search(r"\.(\d+)\.", name), module) for name, module in expert_modules(model)]
    handles = [module.register_forward_pre_hook(record(int(number[1]))) for number, module in layers if number]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()
