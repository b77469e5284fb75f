"""A few fixed prompts whose next-token log-probabilities the trainer computes for itself, to check the engine by."""

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel

from trl_qurl.quantization.fake_quantization import quantized_forward
from trl_qurl.quantization.schemes import QuantizationScheme
from trl_qurl.rollout.proof import compare_probe

PROBE_LENGTHS = (3, 7, 13, 40)
"""Tokens per prompt. The last fills a block of the key-value cache, which a stale prefix cache would serve."""


def probe_prompts(vocabulary_size: int, longest: int | None = None) -> list[list[int]]:
    """
    Prompts of arbitrary tokens, the same at every call.

    Args:
        vocabulary_size: Tokens are below it.
        longest: Prompts are cut to this many tokens, where the engine's context is shorter.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary_size, (sum(PROBE_LENGTHS),), generator=generator).tolist()
    prompts = []
    for length in PROBE_LENGTHS:
        prompts.append(tokens[:length][:longest])
        tokens = tokens[length:]
    return prompts


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
        The largest difference, nats.

    Raises:
        SyncError: The difference is more than rounding explains.
    """
    adapted = is_peft_model(model)
    if adapted:
        model.merge_adapter()
    base: PreTrainedModel = model.get_base_model() if adapted else model
    training = base.training
    base.eval()
    try:
        with quantized_forward(base, layers, scheme) if scheme else nullcontext():
            exact = _logps(base, prompts, scored)
            with torch.autocast(base.device.type, dtype=torch.bfloat16):
                rounded = _logps(base, prompts, scored)
    finally:
        base.train(training)
        if adapted:
            model.unmerge_adapter()
    engine = torch.tensor([logp for tokens in scored for logp in tokens.values()])
    return compare_probe(engine, exact, rounded)


def _logps(model: PreTrainedModel, prompts: list[list[int]], scored: list[dict[int, float]]) -> torch.Tensor:
    found = []
    for prompt, tokens in zip(prompts, scored, strict=True):
        logits = model(input_ids=torch.tensor([prompt], device=model.device)).logits[0, -1]  # (V,)
        found.append(logits.float().log_softmax(-1)[list(tokens)].cpu())
    return torch.cat(found)
