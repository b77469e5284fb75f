"""Log-probabilities over the tokens that `top_k`, `top_p` and `min_p` leave, as the engine's are.

The engine samples token y from the set S that these settings leave, and reports

    log q_S(y) = log q(y) − log Σ_{v ∈ S} q(v)

Over the whole vocabulary, the policy's log-probability would be too small by the mass of S, and the
importance ratio with it. The engine therefore lists its likeliest tokens L at each position, those
outside S with -inf, and the policy's log-probability becomes

    log p_S(y) = z_y − log Σ_{v ∈ L} exp(z_v) + log m,    m = Σ_{v ∈ L} q_S(v)

Where z are the policy's logits over the temperature: a few rows of its head. If L is all of S, then
m is 1 and this is exact, value and gradient. Of a larger S, what is not listed is taken to have the
actor's share of the mass, 1 − m.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trl_qurl.config.checks.sampling import cutting_settings
from trl_qurl.quantization.checkpoint_form import plain_model
from trl_qurl.rollout.samples import Listing
from trl_qurl.trainers.checks.listed_tokens import obstacle_of, warn_of_cuts

MOST_LISTED = 64  # tokens per position; vLLM returns as many log-probabilities
# Beyond `top_k`: vLLM also leaves the tokens with the logit of the last one. In 16 bits up to seven
# have it, with SmolLM2 and Gemma 3 at top_k=20.
TIES = 8
TOKENS_AT_ONCE = 1024  # to compute logits for


class ListedTokens(NamedTuple):
    """What the engine lists for completions: B of T tokens, up to K at each."""

    listed_ids: torch.Tensor  # (B, T, K) int32, the sampled token first; -1 for none
    listed_log_mass: torch.Tensor  # (B, T), log m, in nats

    def metrics(
        self, mask: torch.Tensor, sum_over_processes: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, float]:
        """Return the mean of 1 − m over the listed tokens of a mask, bool (B, T)."""
        is_listed = mask & (self.listed_ids[..., 0] >= 0)
        unlisted = -self.listed_log_mass[is_listed].expm1()
        sums = torch.stack([unlisted.sum(), is_listed.sum()])
        mass, tokens = sum_over_processes(sums).tolist()
        return {"mismatch/unlisted_mass": mass / max(tokens, 1.0)}


def listed_count(trainer: Any, is_ours: bool) -> int:
    """Return how many tokens the engine lists at each position; 0 if the settings cut none.

    Warns if the trainer cannot follow the settings. `is_ours` says whether its log-probabilities
    are computed by trl-qurl.
    """
    cutting = cutting_settings(trainer.args)
    if not cutting:
        return 0
    obstacle = obstacle_of(trainer)
    if not is_ours:
        obstacle = f"{type(trainer).__name__} computes them itself"
    if obstacle is not None:
        warn_of_cuts(trainer.args, obstacle)
        return 0
    vocabulary = plain_model(trainer.model).config.vocab_size
    kept = cutting["top_k"] + TIES if "top_k" in cutting else MOST_LISTED
    return min(kept, MOST_LISTED, vocabulary)


def listed_inputs(inputs: Mapping[str, torch.Tensor]) -> ListedTokens | None:
    """Return the lists in the inputs of a loss, if they are there."""
    if "listed_ids" not in inputs:
        return None
    return ListedTokens(inputs["listed_ids"], inputs["listed_log_mass"])


def list_tokens(listings: Sequence[Listing], length: int, device: torch.device) -> ListedTokens:
    """Return the engine's lists of B completions as tensors, padded to `length` tokens."""
    width = max((ids.size(1) for _, ids in listings), default=1)
    listed_ids = torch.full((len(listings), length, width), -1, dtype=torch.int32)
    logps = torch.full((len(listings), length, width), torch.nan)  # of the engine
    for i, (row_logps, row_ids) in enumerate(listings):
        place = (i, slice(len(row_ids)), slice(row_ids.size(1)))
        listed_ids[place] = row_ids.int()
        logps[place] = row_logps
    is_repeated = listed_ids == listed_ids[..., :1]
    is_repeated[..., 0] = False
    is_cut = logps.isnan() | is_repeated
    listed_ids.masked_fill_(is_cut | is_cut[..., :1], -1)  # nothing, without the sampled token
    mass = logps.masked_fill(is_cut, -torch.inf).logsumexp(-1).clamp(max=0.0)
    return ListedTokens(listed_ids.to(device), mass.to(device))


@contextmanager
def renormalized(trainer: Any, model: Any, listed: ListedTokens | None) -> Iterator[None]:
    """Score completions over the listed tokens inside the block, with TRL's fused head.

    Args:
        trainer: TRL's trainer, for its settings.
        model: The policy, or its reference.
        listed: Of the completions, in the order in which they are scored; `None` changes nothing.
    """
    if listed is None:
        yield
        return
    in_float32 = vars(trainer.args).get("cast_lm_head_to_fp32", False)  # RLOO lacks it
    causal_model = plain_model(trainer.accelerator.unwrap_model(model))
    states: list[torch.Tensor] = []  # of the pass in progress, (b, L, D)
    rows = iter(zip(*listed, strict=True))

    def keep_states(module: Any, args: Any, output: Any) -> None:
        states.append(output.last_hidden_state)

    def renormalize(module: Any, args: Any, output: Any) -> None:
        device = output.log_probs.device  # of the head, if the model is split
        hidden = states.pop().to(device)
        part = [next(rows) for _ in hidden]  # TRL scores a few completions at a time
        ids = torch.stack([row_ids for row_ids, _ in part]).to(device)  # (b, T, K)
        log_mass = torch.stack([row_mass for _, row_mass in part]).to(device)  # (b, T)
        length = ids.size(1)
        is_listed = ids[..., 0] >= 0
        over_list = listed_logps(
            hidden[:, -length - 1 : -1][is_listed],
            module.get_output_embeddings(),
            ids[is_listed].long(),
            trainer.temperature,
            in_float32,
        )
        values = over_list + log_mass[is_listed]
        others, scored = output.log_probs.split([output.log_probs.size(1) - length, length], 1)
        output.log_probs = torch.cat([others, scored.masked_scatter(is_listed, values)], 1)

    hooks = [
        causal_model.base_model.register_forward_hook(keep_states),
        # before the hook of FSDP2, after which each process has only a part of the head
        causal_model.register_forward_hook(renormalize, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if next(rows, None) is not None:
        raise RuntimeError(
            "A forward pass went around TRL's fused head, so top_k, top_p, min_p and structured "
            "outputs cannot be followed: leave them out."
        )


def over_lists(logps: torch.Tensor, logits: torch.Tensor, listed: ListedTokens) -> torch.Tensor:
    """Return log-probabilities over the listed tokens where there are any, (B, T), in nats.

    Args:
        logps: Over the whole vocabulary, (B, T).
        logits: Over the temperature, (B, T, vocabulary).
        listed: Of these tokens.
    """
    ids = listed.listed_ids
    chosen = logits.gather(-1, ids.clamp(min=0).long()).masked_fill(ids < 0, -torch.inf)
    over_list = chosen[..., 0] - chosen.logsumexp(-1) + listed.listed_log_mass
    return torch.where(ids[..., 0] >= 0, over_list, logps)


def listed_logps(
    states: torch.Tensor, head: Any, ids: torch.Tensor, temperature: float, in_float32: bool
) -> torch.Tensor:
    """Return the log-probability of the first of the listed tokens among them, (N,), in nats.

    Args:
        states: What the head is given, (N, D).
        head: The model's last layer.
        ids: (N, K); -1 for none, but not in the first column.
        temperature: Of the distribution.
        in_float32: Whether to compute in float32.
    """
    parts = zip(states.split(TOKENS_AT_ONCE), ids.split(TOKENS_AT_ONCE), strict=True)
    found = [
        # Computed again for the gradient: TRL's fused head keeps no logits either.
        checkpoint(_logps_of_part, *part, head, temperature, in_float32, use_reentrant=False)
        for part in parts
    ]
    return torch.cat(found)


def _logps_of_part(
    states: torch.Tensor, ids: torch.Tensor, head: Any, temperature: float, in_float32: bool
) -> torch.Tensor:
    tokens, places = ids.clamp(min=0).unique(return_inverse=True)
    precision: AbstractContextManager[Any] = nullcontext()
    if in_float32:
        states = states.float()
        precision = torch.autocast(states.device.type, enabled=False)
    weight = head.weight[tokens].to(states.dtype)
    bias = None if head.bias is None else head.bias[tokens].to(states.dtype)
    with precision:
        logits = F.linear(states, weight, bias)  # (N, tokens)
    listed = (logits.float() / temperature).gather(1, places)  # (N, K)
    listed = listed.masked_fill(ids < 0, -torch.inf)
    return listed[:, 0] - listed.logsumexp(1)
