r"""A few fixed prompts whose next-token distributions the trainer computes for itself, to check the engine by.

The engine computes in its own dtype and order, so its figures are never the policy's. How far apart rounding alone
takes them depends on the model: for a sharply trained one on prompts unlike its data, single tokens differ by whole
nats. So the tolerance is measured, with the same weights on the same prompts: the trainer runs its pass a second time
with every layer's output disturbed as rounding to bfloat16 would, and compares its two passes as it compares itself
with the engine. Each prompt gives a distance

$$d(p, q) = \sum_k p_k \, |\log p_k - \log q_k|$$

over the engine's most likely next tokens k, and the median over prompts counts, because a few prompts on the edge
between two answers would rule a mean. The engine is right if

$$\mathrm{median}\; d(engine, policy) \le 3 \; \mathrm{median}\; d(disturbed, policy) + 0.002$$

On sound engines the first median was between 0.2 and 1.8 times the second (INT8, FP8 and BF16 engines; float32 and
bfloat16 policies; random weights and a trained policy at five stages). It was 3 to 300 times the second with one
projection's scales doubled or two layers' projections swapped, except for query and key projections, whose scale a
sharp policy hardly notices and a query norm cancels: those are the digests' to find.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel

from trl_qurl.quantization.fake_quantization import quantized_forward
from trl_qurl.quantization.schemes import QuantizationScheme
from trl_qurl.rollout.errors import SyncError

SHORT_PROMPTS, LONG_PROMPTS = 8, 16
SHORT_LENGTH = 7
BATCH = 4  # prompts per forward pass; it divides both numbers, so that a batch has one length

ROUNDING = 2.0**-8
"""Relative size of the disturbance: the largest error of one rounding to bfloat16, doubled for input and output."""

FACTOR, FLOOR = 3.0, 0.002  # see above; the floor (nats) is for passes in which nothing is rounded


def probe_prompts(vocabulary_size: int, block_size: int, longest: int | None = None) -> list[list[int]]:
    """
    Prompts of arbitrary tokens, the same at every call.

    Two thirds of them fill a block of the key-value cache, which the engine would reuse had it not been emptied.

    Args:
        vocabulary_size: Tokens are below it. Those at both ends, where special tokens stand, are left out.
        block_size: Tokens per block of the engine's key-value cache.
        longest: Prompts are cut to this many tokens, where the engine's context is shorter.
    """
    generator = torch.Generator().manual_seed(0)
    first, last = vocabulary_size // 20, max(1, vocabulary_size * 9 // 10)
    lengths = [SHORT_LENGTH] * SHORT_PROMPTS + [block_size + SHORT_LENGTH] * LONG_PROMPTS
    return [torch.randint(first, last, (length,), generator=generator).tolist()[:longest] for length in lengths]


@torch.no_grad()
def check_probe(
    model: Any,
    prompts: list[list[int]],
    scored: list[dict[int, float]],
    layers: Collection[str],
    scheme: QuantizationScheme | None,
) -> float:
    """
    Compare the engine's next-token log-probabilities with the policy's own, computed with fake quantization.

    Args:
        model: The policy, possibly with an adapter, which is merged for the length of this call.
        prompts: Token lists.
        scored: What the engine said: for each prompt some next tokens with their log-probabilities, nats.
        layers: Names of the quantized layers.
        scheme: Their format; `None` for an unquantized engine.

    Returns:
        The median distance, nats.

    Raises:
        SyncError: The distance is more than rounding explains.
    """
    adapted = is_peft_model(model)
    if adapted:
        model.merge_adapter()
    base: PreTrainedModel = model.get_base_model() if adapted else model
    training = base.training
    base.eval()
    try:
        with quantized_forward(base, layers, scheme) if scheme else nullcontext():
            policy = _next_token_logps(base, prompts)
            with _disturbed(base):
                disturbed = _next_token_logps(base, prompts)
    finally:
        base.train(training)
        if adapted:
            model.unmerge_adapter()
    return compare_probe(scored, policy, disturbed)


def compare_probe(scored: list[dict[int, float]], policy: torch.Tensor, disturbed: torch.Tensor) -> float:
    """
    Compare distributions by the rule of this module.

    Args:
        scored: The engine's log-probabilities of some next tokens, one dictionary per prompt.
        policy: The policy's, of all tokens, (prompts, V).
        disturbed: The same, disturbed by rounding, (prompts, V).

    Returns:
        The median distance, nats.

    Raises:
        SyncError: The distance is more than rounding explains, or is not a number.
    """
    distances, explained = [], []
    for row, tokens in enumerate(scored):
        chosen = list(tokens)
        engine = torch.tensor(list(tokens.values()))
        weight, reference = engine.exp(), policy[row, chosen]
        distances.append((weight * (engine - reference).abs()).sum())
        explained.append((weight * (disturbed[row, chosen] - reference).abs()).sum())
    distance = torch.stack(distances).median().item()
    tolerance = FACTOR * torch.stack(explained).median().item() + FLOOR
    if not distance <= tolerance:
        raise SyncError(
            f"The engine's log-probabilities of the probe differ from the policy's own quantized forward pass by "
            f"{distance:.3g} nats, where rounding explains {tolerance:.3g}: it does not compute with the weights "
            "that were sent, or keeps a cache from older ones. Training has stopped; resume from the last checkpoint. "
            "If the engine is right and this check is not, sync_probe=False leaves it out."
        )
    return distance


def _next_token_logps(model: PreTrainedModel, prompts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities after each prompt, (prompts, V), float32."""
    found = []
    for first in range(0, len(prompts), BATCH):
        tokens = torch.tensor(prompts[first : first + BATCH], device=model.device)
        found.append(model(input_ids=tokens).logits[:, -1].float().log_softmax(-1).cpu())
    return torch.cat(found)


@contextmanager
def _disturbed(model: nn.Module) -> Iterator[None]:
    """Let every layer with weights add a relative error of up to `ROUNDING` to its output inside the block."""
    generators: dict[torch.device, torch.Generator] = {}

    def disturb(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        device = output.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        error = torch.rand(output.shape, generator=generator, device=device).mul_(2).sub_(1)
        return (output.float() * (1 + ROUNDING * error)).to(output.dtype)

    handles: list[Any] = [
        module.register_forward_hook(disturb)
        for module in model.modules()
        if getattr(module, "weight", None) is not None and not list(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
