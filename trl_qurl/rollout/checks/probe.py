r"""Check what the engine computes: the trainer scores the engine's continuations of a few fixed
prompts.

The engine continues each prompt greedily and reports the log-probabilities of the likeliest tokens
at every step. The trainer scores the same tokens with its own quantized forward pass. The two never
agree exactly, and how far apart rounding alone puts them depends on the model. So the trainer runs
its pass a second time, with every layer's output disturbed as rounding to bfloat16 would. From the
distance of a step over the engine's likeliest next tokens k,

$$d(p, q) = \sum_k p_k \, |\log p_k - \log q_k|,$$

and its median over steps, because a few near-tie steps would dominate a mean, follows the *ratio*
of the probe:

$$\mathrm{median}\; d(engine, policy) \;/\; (3 \; \mathrm{median}\; d(disturbed, policy) + 0.002)$$

Up to 1, rounding explains the distance: of 110 probes of sound engines on CPUs without AMX (INT8,
FP8 and BF16; random and trained policies) none had a ratio above 0.71. Other kernels round
differently: a sound engine on a CPU with AMX had 1.5. So a ratio above 1 is only a warning. It is
an error above `FAULT_RATIO` or, once the run's first check has shown what is normal on this
machine, above `GROWTH` times that ratio. A projection swapped with another layer's had ratios of 4
to 170, doubled scales mostly 2 to 30. Scales of query and key projections barely affect a sharp
policy; digests catch those.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from trl_qurl.quantization.checkpoint_form import expert_modules, plain_model
from trl_qurl.quantization.fake_quantization import quantized_forward
from trl_qurl.quantization.formats import FP8_CACHES, TOKEN_CACHES
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.wire import Continuation, Engine

logger = logging.getLogger(__name__)

SHORT_LENGTH = 7  # tokens
STEPS = 8  # tokens by which each prompt is continued
# largest relative error of one rounding to bfloat16, doubled for input and output
ROUNDING = 2.0**-8
FACTOR, FLOOR = 3.0, 0.002  # see above; the floor (nats) is for passes that round nothing
# no rounding explains it on any machine: four times the largest ratio of a sound engine
FAULT_RATIO = 6.0
# after the first check, the limit is `GROWTH` times its ratio, at least `MIN_LIMIT`
GROWTH, MIN_LIMIT = 4.0, 2.0


class ProbeResult(NamedTuple):
    """The result of a probe; both are NaN if the engine's log-probabilities are."""

    distance: float  # between engine and policy, in nats
    ratio: float  # of the distance to the one that rounding explains


def judge_probe(result: ProbeResult, run_limit: float | None) -> float:
    """Accept a result, warn, or raise `SyncError`; return the run's limit, which its first result
    (`None`) sets.
    """
    limit = run_limit or FAULT_RATIO
    clause = (
        "The engine's log-probabilities of the probe differ from the policy's own quantized "
        f"forward pass by {result.distance:.3g} nats, {result.ratio:.2g} times what rounding "
        f"explains (limit {limit:.2g})"
    )
    if not result.ratio <= limit:  # also catches NaN
        raise SyncError(
            f"{clause}: it does not use the weights that were sent, or keeps a cache from older "
            "ones. Resume from the last checkpoint. If the engine is right and this check is "
            "wrong, set sync_check_interval=0."
        )
    if result.ratio > 1:
        advice = (
            "Kernels may round differently here: mismatch/kl_k3 and sync/probe_ratio should stay "
            "level."
        )
        logger.warning("%s. %s", clause, advice)
    return run_limit or max(MIN_LIMIT, min(FAULT_RATIO, GROWTH * result.ratio))


def probe_prompts(vocabulary_size: int, block_size: int, max_model_len: int) -> list[list[int]]:
    """Return fixed prompts of arbitrary tokens, without both ends of the vocabulary (special
    tokens).

    Most fill a block of the key-value cache, which the engine would reuse if it had not been
    cleared.
    """
    generator = torch.Generator().manual_seed(0)
    first, last = vocabulary_size // 20, max(1, vocabulary_size * 9 // 10)
    lengths = [SHORT_LENGTH, block_size + SHORT_LENGTH, block_size + SHORT_LENGTH]
    prompts = [
        torch.randint(first, last, (length,), generator=generator).tolist() for length in lengths
    ]
    return [prompt[: max(1, max_model_len - STEPS)] for prompt in prompts]


def ask_engine(engine: Engine, vocabulary_size: int) -> list[Continuation] | None:
    """Return an engine's greedy continuations of the probe's prompts; `None` if it rounds keys and
    values.
    """
    description = engine.describe()
    if description.kv_cache_dtype in FP8_CACHES + TOKEN_CACHES:
        return None  # the trainer's own pass has no such cache to compare with
    prompts = probe_prompts(vocabulary_size, description.block_size, description.max_model_len)
    return engine.continue_greedily(prompts, STEPS)


@torch.no_grad()
def run_probe(
    model: Any, answer: list[Continuation], weights: WeightStream, is_merged: bool = True
) -> ProbeResult:
    """Compare the engine's log-probabilities with the policy's own, computed with fake
    quantization.

    Weights are rounded and inputs smoothed as in `weights`, which the engine was sent. `is_merged`
    says whether it got them with the adapter merged; then it is merged in rounded layers. All
    others compute as the policy does.
    """
    base = plain_model(model)
    training = base.training
    base.eval()
    try:
        rounding = weights.plan, weights.smoothing, weights.grid, is_merged, weights.is_rounded
        autocast = torch.autocast(base.device.type, weights.grid, weights.grid is not None)
        with autocast, quantized_forward(base, *rounding):
            policy = _score(base, answer)
            with _disturbed(base):
                disturbed = _score(base, answer)
    finally:
        base.train(training)
    return compare_probe(
        [logps for continuation in answer for logps in continuation.logps], policy, disturbed
    )


def compare_probe(
    scored: list[dict[int, float]], policy: torch.Tensor, disturbed: torch.Tensor
) -> ProbeResult:
    """Compare the engine's likeliest tokens at each step with the policy's, plain and disturbed,
    (steps, V).
    """
    distances, explained = [], []
    for row, tokens in enumerate(scored):
        chosen = list(tokens)
        engine = torch.tensor(list(tokens.values()))
        weight, reference = engine.exp(), policy[row, chosen]
        distances.append((weight * (engine - reference).abs()).sum())
        explained.append((weight * (disturbed[row, chosen] - reference).abs()).sum())
    tolerance = FACTOR * torch.stack(explained).median().item() + FLOOR
    distance = torch.stack(distances).median().item()
    return ProbeResult(distance, distance / tolerance)


def _score(model: PreTrainedModel, answer: list[Continuation]) -> torch.Tensor:
    """Return log-probabilities of all tokens at each step of each continuation, (steps, V),
    float32.
    """
    # One pass, because each rounds all weights again. The model is causal: padding on the right
    # changes nothing.
    sequences = [torch.tensor(continuation.prompt + continuation.tokens) for continuation in answer]
    # (B, T, V)
    logits = model(input_ids=pad_sequence(sequences, batch_first=True).to(model.device)).logits
    # Each step is scored after the token before it.
    starts = [len(continuation.prompt) - 1 for continuation in answer]
    steps = [
        row[start : start + len(c.tokens)]
        for row, start, c in zip(logits, starts, answer, strict=True)
    ]
    return torch.cat(steps).float().log_softmax(-1).cpu()


@contextmanager
def _disturbed(model: nn.Module) -> Iterator[None]:
    """Inside the block, add a relative error of up to `ROUNDING` to the output of every layer with
    weights.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def disturb(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output  # a router; its input is already disturbed
        device = output.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        error = torch.rand(output.shape, generator=generator, device=device).mul_(2).sub_(1)
        return (output.float() * (1 + ROUNDING * error)).to(output.dtype)

    experts = {module for _, module in expert_modules(model)}
    handles: list[Any] = [
        module.register_forward_hook(disturb)
        for module in model.modules()
        if module in experts
        or "forward" in vars(module)  # a whole PEFT layer
        or (getattr(module, "weight", None) is not None and not list(module.children()))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
