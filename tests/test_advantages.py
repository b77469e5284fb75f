"""Advantages, whitening and the value loss: against slow loops,
and by hand.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_qurl.advantages import (
    bootstrap_values,
    explained_variance,
    generalized_advantages,
    masked_moments,
    token_rewards,
    value_loss,
    whiten,
)


def slow_advantages(rewards, values, bootstrap, mask, gamma, lam):
    """The definition, A_t = Σ_k (γλ)^k δ_{t+k}, over the learned tokens of each sequence."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        steps = mask[row].nonzero().flatten().tolist()
        V = [*values[row, steps], bootstrap[row]]
        delta = []
        for i, t in enumerate(steps):
            delta.append(rewards[row, t] + gamma * V[i + 1] - V[i])
        for i, t in enumerate(steps):
            for k, later in enumerate(delta[i:]):
                advantages[row, t] += (gamma * lam) ** k * later
    return advantages, (advantages + values) * mask


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**31 - 1),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    dense=st.booleans(),
)
def test_gae_equals_its_definition_on_random_batches(seed, gamma, lam, dense):
    torch.manual_seed(seed)
    B = 1 + seed % 4
    T = 1 + seed % 9
    lengths = torch.randint(0, T + 1, (B, 1))
    # padding, and tools between
    mask = torch.arange(T) < lengths
    mask &= torch.rand(B, T) > 0.3
    rewards = token_rewards(torch.randn(B).double(), mask)
    if dense:
        rewards = torch.randn(B, T).double() * mask
    is_cut = torch.rand(B) > 0.5
    bootstrap = torch.randn(B).double() * is_cut
    values = torch.randn(B, T).double()
    given = (rewards, values, bootstrap, mask, gamma, lam)
    seen = generalized_advantages(*given)
    advantages, returns = slow_advantages(*given)
    torch.testing.assert_close(seen.advantages, advantages)
    torch.testing.assert_close(seen.returns, returns)


def test_a_reward_comes_with_the_last_token_that_is_learned():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert rewards.tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0]]


def test_only_truncated_completions_are_bootstrapped():
    # Cut at full length; ended by token 1; cut early, say by a tool. Padding, 0, comes after.
    ids = torch.tensor([[5, 6, 7], [5, 1, 0], [5, 0, 0]])
    values = torch.arange(4.0).expand(3, 4)
    assert bootstrap_values(values, ids, ids != 0, {0, 1}).tolist() == [3.0, 0.0, 1.0]


def test_whitened_is_mean_0_and_variance_1_over_the_mask():
    torch.manual_seed(0)
    mask = torch.rand(8, 16) > 0.4
    tensor = 10 + 0.01 * torch.randn(8, 16)  # Σ x² − n·mean² has no digits left here
    white = whiten(tensor, mask, masked_moments(tensor, mask))
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-3)
    assert white[mask].var().item() == pytest.approx(1, rel=1e-3)
    assert not white[~mask].any()
    # Another process has the same tensor.
    both = masked_moments(tensor, mask, lambda sums: 2 * sums)
    expected = masked_moments(torch.cat([tensor] * 2), torch.cat([mask] * 2))
    torch.testing.assert_close(both, expected)


def test_whitening_survives_what_has_no_spread():
    alike = torch.tensor([[0.7, 0.7, 9.0]])
    for learned in ([1, 1, 0], [1, 0, 0], [0, 0, 0]):
        mask = torch.tensor([learned]).bool()
        assert not whiten(alike, mask, masked_moments(alike, mask)).any()


# With an old value of 0 and a range of 0.5
CLIPPING = """\
value  target  loss   gradient  clipped
  0.2     1.0  0.32       -0.8  no       inside the range: 0.5 * 0.8²
  0.8     1.0  0.125       0.0  yes      moved far enough towards its target: clip gives 0.5
  0.8    -1.0  1.62        1.8  no       moved away: the full error, and the way back is open
 -0.9    -1.0  0.125       0.0  yes"""


@pytest.mark.parametrize("case", CLIPPING.splitlines()[1:])
def test_value_clipping_by_hand(case):
    *numbers, clipped = case.split()[:5]
    start, target, loss, gradient = map(float, numbers)
    value = torch.tensor([[start]], requires_grad=True)
    seen = value_loss(value, torch.zeros(1, 1), torch.tensor([[target]]), clip_range=0.5)
    seen.loss.sum().backward()
    assert seen.loss.item() == pytest.approx(loss)
    assert value.grad.item() == pytest.approx(gradient)
    assert seen.clipped.item() is (clipped == "yes")


def test_explained_variance():
    torch.manual_seed(0)
    returns = torch.randn(6, 7)
    mask = torch.rand(6, 7) > 0.3
    constant = torch.full((6, 7), 3.0)
    assert explained_variance(returns, returns, mask) == pytest.approx(1)
    assert explained_variance(constant, returns, mask) == pytest.approx(0, abs=1e-6)
    # twice the error: 1 − 4
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3, rel=1e-5)
    shifted = explained_variance(0.5 * returns, returns, mask, lambda sums: 2 * sums)
    assert shifted == pytest.approx(0.75)
    assert math.isnan(explained_variance(returns, constant, mask))
