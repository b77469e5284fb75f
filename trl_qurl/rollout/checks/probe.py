r"""A few fixed prompts whose continuations the trainer scores for itself, to check the engine by.

The engine continues each prompt greedily and says how probable it found the likeliest tokens at every step; the
trainer scores the same tokens. The engine computes in its own dtype and order, so the figures never agree. How far
apart rounding alone takes them depends on the model: for a sharply trained one on text unlike its data, single tokens
differ by whole nats. So the tolerance is measured, with the same weights on the same tokens: the trainer runs its pass
a second time with every layer's output disturbed as rounding to bfloat16 would, and compares its two passes as it
compares itself with the engine. Each step gives a distance

$$d(p, q) = \sum_k p_k \, |\log p_k - \log q_k|$$

over the engine's likeliest next tokens k, and the median over steps counts, because a few on the edge between two
continuations would rule a mean. The engine is right if

$$\mathrm{median}\; d(engine, policy) \le 3 \; \mathrm{median}\; d(disturbed, policy) + 0.002$$

Of 110 probes of sound engines (INT8, FP8 and BF16; float32 and bfloat16 policies; random weights, and a trained policy
at four stages; ten sets of prompts each) none used more than 0.71 of that. With a layer's projection swapped for
another's, all exceeded it, 4 to 170 times over; with one projection's scales doubled most did. Query and key
projections, whose scale a sharp policy hardly notices and a query norm cancels, are the digests' to find.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel

from trl_qurl.quantization.fake_quantization import quantized_forward
from trl_qurl.quantization.schemes import QuantizationScheme
from trl_qurl.rollout.errors import SyncError

SHORT_LENGTH = 7  # tokens
LONG_PROMPTS = 2  # beside one short one
STEPS = 8  # tokens by which each prompt is continued

ROUNDING = 2.0**-8
"""Relative size of the disturbance: the largest error of one rounding to bfloat16, doubled for input and output."""

FACTOR, FLOOR = 3.0, 0.002  # see above; the floor (nats) is for passes in which nothing is rounded


class Continuation(NamedTuple):
    """What the engine made of a prompt."""

    tokens: list[int]
    logps: list[dict[int, float]]  # at each of them, the likeliest tokens' log-probabilities, nats


def probe_prompts(vocabulary_size: int, block_size: int, max_model_len: int) -> list[list[int]]:
    """
    Prompts of arbitrary tokens, the same at every call.

    Most fill a block of the key-value cache, which the engine would use again had it not been emptied.

    Args:
        vocabulary_size: Tokens are below it. Those at both ends, where special tokens stand, are left out.
        block_size: Tokens per block of the engine's key-value cache.
        max_model_len: Tokens that prompt and continuation may have together.
    """
    generator = torch.Generator().manual_seed(0)
    first, last = vocabulary_size // 20, max(1, vocabulary_size * 9 // 10)
    lengths = [SHORT_LENGTH] + [block_size + SHORT_LENGTH] * LONG_PROMPTS
    prompts = [torch.randint(first, last, (length,), generator=generator).tolist() for length in lengths]
    return [prompt[: max(1, max_model_len - STEPS)] for prompt in prompts]


@torch.no_grad()
def check_probe(
    model: Any,
    prompts: list[list[int]],
    continuations: list[Continuation],
    layers: Collection[str],
    scheme: QuantizationScheme | None,
) -> float:
    """
    Compare the engine's log-probabilities with the policy's own, computed with fake quantization.

    Args:
        model: The policy, possibly with an adapter, which is merged for the length of this call.
        prompts: Token lists.
        continuations: What the engine said, one per prompt.
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
            policy = _score(base, prompts, continuations)
            with _disturbed(base):
                disturbed = _score(base, prompts, continuations)
    finally:
        base.train(training)
        if adapted:
            model.unmerge_adapter()
    scored = [logps for continuation in continuations for logps in continuation.logps]
    return compare_probe(scored, policy, disturbed)


def compare_probe(scored: list[dict[int, float]], policy: torch.Tensor, disturbed: torch.Tensor) -> float:
    """
    Compare distributions by the rule of this module.

    Args:
        scored: The engine's log-probabilities of the likeliest tokens, one dictionary per step.
        policy: The policy's, of all tokens, (steps, V).
        disturbed: The same, disturbed by rounding, (steps, V).

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


def _score(model: PreTrainedModel, prompts: list[list[int]], continuations: list[Continuation]) -> torch.Tensor:
    """Log-probabilities of all tokens at each step of each continuation, (steps, V), float32."""
    found = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        tokens = torch.tensor([prompt + continuation.tokens], device=model.device)  # (1, T)
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]  # what follows each token but the last
        found.append(logits.float().log_softmax(-1).cpu())
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
