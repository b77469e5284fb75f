"""Training with a critic: rewards per token, generalized advantages (GAE), and the value loss.

Pure functions of tensors and floats. For a mean over all processes, the caller passes a function
that sums over them.

Shapes: `B` sequences, `T` completion tokens. `mask` is true on the *learned* tokens, which the
policy itself produced. Padding and tool output are not actions: GAE skips them, and these functions
return 0 there. `values[:, t]` is the critic's estimate before token `t` is chosen.
"""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

SumOverProcesses = Callable[[torch.Tensor], torch.Tensor]
"""Elementwise sum of a tensor over all processes."""


class Advantages(NamedTuple):
    """Learning signals of the policy and the critic; both 0 where the mask is false."""

    advantages: torch.Tensor  # `(B, T)`, in units of reward
    returns: torch.Tensor  # `(B, T)`, the critic's targets, in units of reward


class Moments(NamedTuple):
    """Mean and variance of the masked elements on all processes."""

    mean: torch.Tensor  # scalar
    variance: torch.Tensor  # scalar, unbiased; NaN for fewer than two


class ValueLoss(NamedTuple):
    """The critic's loss per token, not yet averaged."""

    loss: torch.Tensor  # `(B, T)`, in squared units of reward
    clipped: torch.Tensor  # `(B, T)`, bool: the clipped term is larger, so no gradient flows


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum the rewards of several functions, as TRL does.

        R = Σ_f w_f · r_f

    Args:
        rewards: r, `(N, functions)`, NaN where a function has not scored.
        weights: w, `(functions,)`.

    Returns:
        R, `(N,)`, NaN where no function has scored.
    """
    totals = (rewards * weights.to(rewards.device)).nansum(1)
    return totals.masked_fill(rewards.isnan().all(1), math.nan)


def token_rewards(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Convert one reward per sequence into per-token rewards.

        r_t = R · [t is the last learned token]

    Args:
        rewards: R, `(B,)`.
        mask: `(B, T)`.

    Returns:
        r, `(B, T)`. A sequence without learned tokens gets no reward.
    """
    mask = mask.bool()
    positions = torch.arange(mask.size(1), device=mask.device)  # (T,)
    learned = torch.where(mask, positions, -1)  # (B, T)
    last = learned.amax(dim=1, keepdim=True)  # (B, 1), -1 if no token is learned
    # Not a product, so an undefined reward (NaN) does not spread over the whole sequence.
    return torch.where(positions == last, rewards.unsqueeze(1), 0.0)  # (B, T)


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    bootstrap: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> Advantages:
    """Compute generalized advantage estimates over the learned tokens.

        δ_t = r_t + γ·V_{t+1} − V_t,    A_t = δ_t + γ·λ·A_{t+1},    returns_t = A_t + V_t

    Where t+1 is the next *learned* token. After the last one, V is `bootstrap` and A is 0. Source:
    Schulman et al. 2016, arXiv:1506.02438, Eq. 11-16.

    Args:
        rewards: r, `(B, T)`; see `token_rewards`.
        values: V, `(B, T)`.
        bootstrap: `(B,)`: the value after the last token of a truncated completion, 0 for one that
            ended.
        mask: `(B, T)`.
        gamma: γ in [0, 1], the discount per token.
        gae_lambda: λ in [0, 1]: 0 trusts the critic, 1 the rewards.

    Returns:
        Advantages and returns, each `(B, T)`.
    """
    mask = mask.bool()
    advantages = torch.zeros_like(values)
    next_value = bootstrap  # (B,)
    next_advantage = torch.zeros_like(bootstrap)  # (B,)
    for t in reversed(range(mask.size(1))):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    returns = torch.where(mask, advantages + values, 0.0)
    return Advantages(advantages, returns)


def bootstrap_values(
    values: torch.Tensor,
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    ends: Collection[int],
) -> torch.Tensor:
    """Return the critic's estimate after each truncated completion, and 0 after one that ended.

    Args:
        values: `(B, T + 1)`: before each token and, in the last column, after all of them.
        completion_ids: `(B, T)`.
        completion_mask: `(B, T)`, 1 for tokens of the completion, which come first.
        ends: IDs of the tokens that end a completion.

    Returns:
        `(B,)`, the value after the last token, or 0.
    """
    lengths = completion_mask.sum(dim=1, keepdim=True)  # (B, 1)
    last_ids = completion_ids.gather(1, (lengths - 1).clamp(min=0)).squeeze(1)  # (B,)
    ended = torch.isin(last_ids, torch.tensor(list(ends), device=last_ids.device))
    last_values = values.gather(1, lengths).squeeze(1)
    return torch.where(ended, 0.0, last_values)


def masked_moments(
    tensor: torch.Tensor, mask: torch.Tensor, sum_over_processes: SumOverProcesses = torch.clone
) -> Moments:
    """Compute the mean and unbiased variance of the masked elements of all processes.

        mean = Σ x / n,    variance = Σ (x − mean)² / (n − 1)

    Args:
        tensor: Any shape.
        mask: The same shape.
        sum_over_processes: How to sum a tensor over the processes; by default there is only one.

    Returns:
        Scalars. The mean of no elements is NaN, and so is the variance of fewer than two.
    """
    # Two passes, because Σ x² − n·mean² loses all digits if the spread is small compared with the
    # mean.
    elements = tensor.detach().float()[mask.bool()]
    own_count = elements.new_tensor(float(elements.numel()))
    total, count = sum_over_processes(torch.stack([elements.sum(), own_count]))
    mean = total / count
    squares = sum_over_processes((elements - mean).square().sum())
    return Moments(mean, squares / (count - 1).clamp(min=0.0))


def whiten(tensor: torch.Tensor, mask: torch.Tensor, moments: Moments) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1.

        (x − mean) / sqrt(variance + 1e-8)

    Source: `masked_whiten` of verl and of TRL's former PPO trainer.

    Args:
        tensor: `(B, T)`.
        mask: `(B, T)`.
        moments: Those of the whole batch; see `masked_moments`.

    Returns:
        `(B, T)`, 0 where the mask is false. A single element has no variance and is only shifted.
    """
    variance = torch.where(moments.variance.isnan(), 1.0, moments.variance)
    whitened = (tensor - moments.mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask.bool(), whitened, 0.0)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> ValueLoss:
    """Compute the squared error of the critic, clipped like the policy's ratio.

        ½ · max((V − R)², (clip(V, V_old − c, V_old + c) − R)²)

    Once a value has moved by c toward its target, the same rollout stops pushing it. Source:
    OpenAI's `baselines/ppo2`, adopted by TRL's former PPO trainer and by verl.

    Args:
        values: V, `(B, T)`, the only input that receives a gradient.
        old_values: V_old, `(B, T)`, at the time of the rollout.
        returns: R, `(B, T)`.
        clip_range: Distance c, in units of reward; `None` for no clipping.

    Returns:
        The loss and where it is clipped, each `(B, T)`.
    """
    errors = (values - returns).square()
    if clip_range is None:
        nowhere = torch.zeros_like(errors, dtype=torch.bool)
        return ValueLoss(0.5 * errors, nowhere)
    clipped_values = values.clamp(old_values - clip_range, old_values + clip_range)
    clipped_errors = (clipped_values - returns).square()
    loss = 0.5 * torch.maximum(errors, clipped_errors)
    return ValueLoss(loss, clipped=clipped_errors > errors)


def explained_variance(
    values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    sum_over_processes: SumOverProcesses = torch.clone,
) -> float:
    """Compute the share of the returns' variance that the critic explains.

        1 − Var(returns − values) / Var(returns)

    1 is a perfect critic. 0 is no better than a constant, and below 0 is worse.

    Args:
        values: `(B, T)`.
        returns: `(B, T)`.
        mask: `(B, T)`.
        sum_over_processes: See `masked_moments`.

    Returns:
        At most 1; NaN if all returns are equal, because there is nothing to explain.
    """
    total = masked_moments(returns, mask, sum_over_processes).variance
    residual = masked_moments(returns - values, mask, sum_over_processes).variance
    if not total > 0:  # also if it is NaN
        return math.nan
    return (1 - residual / total).item()
