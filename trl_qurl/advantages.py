"""From rewards to advantages with a critic: per-token rewards, generalized advantage estimation, the value loss.

Pure functions of tensors and floats; nothing here knows a trainer, a config or a process group. Where a mean runs over
all processes, the caller passes in how to sum over them.

Shapes: `B` sequences, `T` completion tokens. `mask` is true on the *learned* tokens, which the policy produced itself;
padding and what tools returned are no actions of the policy: time does not pass there, and what these functions
return is 0 there. `values[:, t]` is the critic's estimate before token `t` is chosen.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

SumOverProcesses = Callable[[torch.Tensor], torch.Tensor]
"""Elementwise sum of a tensor over all processes."""


class Advantages(NamedTuple):
    """What the policy and the critic learn from; both 0 where the mask is false."""

    advantages: torch.Tensor  # `(B, T)`, in units of reward
    returns: torch.Tensor  # `(B, T)`, the critic's targets, in units of reward


class Moments(NamedTuple):
    """Mean and variance of the masked elements on all processes."""

    mean: torch.Tensor  # scalar
    variance: torch.Tensor  # scalar, unbiased
    elements: torch.Tensor  # scalar, how many there are


class ValueLoss(NamedTuple):
    """The critic's loss before it is averaged."""

    loss: torch.Tensor  # `(B, T)`, in squared units of reward
    clipped: torch.Tensor  # `(B, T)`, bool: the clipped term is the larger one, and passes no gradient


def token_rewards(rewards: torch.Tensor, mask: torch.Tensor, penalty: torch.Tensor | None = None) -> torch.Tensor:
    """Spread the rewards of whole sequences over their tokens.

        r_t = R · [t is the last learned token] − penalty_t

    Source: Ziegler et al. 2019, arXiv:1909.08593, Eq. 2, with penalty = β·(log π − log π_ref).

    Args:
        rewards: R, `(B,)`.
        mask: `(B, T)`.
        penalty: `(B, T)`, in units of reward; `None` for none.

    Returns:
        R, `(B, T)`. A sequence without learned tokens has no place for its reward and gets none.

    Raises:
        ValueError: The shapes do not fit.
    """
    mask = mask.bool()
    if rewards.shape != mask.shape[:1]:
        raise ValueError(f"Got rewards {tuple(rewards.shape)} for a mask {tuple(mask.shape)}: one per sequence.")
    positions = torch.arange(mask.size(1), device=mask.device)  # (T,)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)  # (B, 1), -1 if there is none
    # `where`, not a product: an undefined reward (NaN) must not spread over the whole sequence.
    spread = torch.where(positions == last, rewards.unsqueeze(1), 0.0)  # (B, T)
    return spread if penalty is None else spread - torch.where(mask, penalty, 0.0)


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    bootstrap: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> Advantages:
    """Generalized advantage estimation over the learned tokens.

        δ_t = r_t + γ·V_{t+1} − V_t,    A_t = δ_t + γ·λ·A_{t+1},    returns_t = A_t + V_t

    Where t+1 is the next *learned* token, and behind the last one V is `bootstrap` and A is 0. Source: Schulman et al.
    2016, arXiv:1506.02438, Eq. 11-16.

    Args:
        rewards: R, `(B, T)`; see `token_rewards`.
        values: V, `(B, T)`.
        bootstrap: `(B,)`: the value after the last token where a completion was cut, 0 where it ended.
        mask: `(B, T)`.
        gamma: γ in [0, 1], the discount per token.
        gae_lambda: λ in [0, 1]: 0 trusts the critic, 1 the rewards.

    Returns:
        Advantages and returns, each `(B, T)`.

    Raises:
        ValueError: The shapes do not fit.
    """
    if not rewards.shape == values.shape == mask.shape or bootstrap.shape != mask.shape[:1]:
        raise ValueError(
            f"Got rewards {tuple(rewards.shape)}, values {tuple(values.shape)}, mask {tuple(mask.shape)} and "
            f"bootstrap {tuple(bootstrap.shape)}: the first three must have one shape (B, T), the last (B,)."
        )
    mask = mask.bool()
    advantages = torch.zeros_like(values)
    next_value, next_advantage = bootstrap, torch.zeros_like(bootstrap)  # (B,)
    for t in reversed(range(mask.size(1))):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    return Advantages(advantages, torch.where(mask, advantages + values, 0.0))


def bootstrap_values(
    values: torch.Tensor, completion_ids: torch.Tensor, completion_mask: torch.Tensor, ends: Collection[int]
) -> torch.Tensor:
    """What the critic expects after a completion: nothing where it ended by itself, its estimate where it was cut.

    Args:
        values: `(B, T + 1)`: before each token and, in the last column, after them all.
        completion_ids: `(B, T)`.
        completion_mask: `(B, T)`, 1 for tokens of the completion, which come first.
        ends: Tokens that end a completion.

    Returns:
        `(B,)`, the value after the last token, or 0.
    """
    lengths = completion_mask.sum(dim=1, keepdim=True)  # (B, 1)
    last_ids = completion_ids.gather(1, (lengths - 1).clamp(min=0)).squeeze(1)  # (B,)
    ended = torch.isin(last_ids, torch.tensor(list(ends), device=last_ids.device))
    return torch.where(ended, 0.0, values.gather(1, lengths).squeeze(1))


def masked_moments(
    tensor: torch.Tensor, mask: torch.Tensor, sum_over_processes: SumOverProcesses = torch.clone
) -> Moments:
    """Mean and unbiased variance of the masked elements of all processes.

        mean = Σ x / n,    variance = Σ (x − mean)² / (n − 1)

    Args:
        tensor: Any shape.
        mask: The same shape.
        sum_over_processes: How to add up a tensor over the processes; default: there is one.

    Returns:
        Scalars; NaN where there are no elements, and for the variance of a single one, which has none.
    """
    # In two passes: Σ x² − n·mean² would lose all digits where the spread is small compared with the mean.
    kept = tensor.detach().float()[mask.bool()]
    total, count = sum_over_processes(torch.stack([kept.sum(), kept.new_tensor(float(kept.numel()))]))
    mean = total / count
    squares = sum_over_processes((kept - mean).square().sum())
    return Moments(mean, squares / (count - 1).clamp(min=0.0), count)


def whiten(tensor: torch.Tensor, mask: torch.Tensor, moments: Moments) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1.

        (x − mean) / sqrt(variance + 1e-8)

    Source: `masked_whiten` of verl and of TRL's former PPO trainer.

    Args:
        tensor: `(B, T)`.
        mask: `(B, T)`.
        moments: Of the whole batch; see `masked_moments`.

    Returns:
        `(B, T)`, 0 where the mask is false. A single element has no spread and is only shifted.
    """
    variance = torch.where(moments.elements > 1, moments.variance, 1.0)
    return torch.where(mask.bool(), (tensor - moments.mean) * torch.rsqrt(variance + 1e-8), 0.0)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> ValueLoss:
    """Squared error of the critic, clipped like the policy's ratio.

        ½ · max((V − R)², (clip(V, V_old − c, V_old + c) − R)²)

    So a value that has already moved by c towards its target is not pushed further by the same rollout. Source:
    `baselines/ppo2` of OpenAI, kept by TRL's former PPO trainer and by verl.

    Args:
        values: V, `(B, T)`, the only input that gets a gradient.
        old_values: V_old, `(B, T)`, at the time of the rollout.
        returns: R, `(B, T)`.
        clip_range: Distance c, in units of reward; `None` for no clipping.

    Returns:
        Loss and what was clipped, each `(B, T)`.
    """
    errors = (values - returns).square()
    if clip_range is None:
        return ValueLoss(0.5 * errors, torch.zeros_like(errors, dtype=torch.bool))
    near = values.clamp(old_values - clip_range, old_values + clip_range)
    clipped_errors = (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(errors, clipped_errors), clipped_errors > errors)


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, sum_over_processes: SumOverProcesses = torch.clone
) -> float:
    """Share of the returns' variance that the critic accounts for.

        1 − Var(returns − values) / Var(returns)

    1 is a perfect critic, 0 one that knows no more than a constant; below 0 it is worse than that.

    Args:
        values: `(B, T)`.
        returns: `(B, T)`.
        mask: `(B, T)`.
        sum_over_processes: See `masked_moments`.

    Returns:
        At most 1; NaN where all returns are equal, because there is nothing to explain.
    """
    spread = masked_moments(returns, mask, sum_over_processes).variance
    error = masked_moments(returns - values, mask, sum_over_processes).variance
    return (1 - error / spread).item() if spread > 0 else float("nan")
