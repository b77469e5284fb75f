"""Advantages, whitening and the value loss: against slow loops,
by hand, and over real processes.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_qurl.advantages import (
    explained_variance,
    generalized_advantages,
    masked_moments,
    token_rewards,
    value_loss,
    whiten,
)


def slow_advantages(rewards, values, bootstrap, mask, gamma, lam):
    """The definition, A_t = Σ_k (γλ)^k δ_{t+k}, over the learned tokens of each sequence."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for row in range(len(values)):
        steps = [t for t in range(values.size(1)) if mask[row, t]]
        r = [rewards[row, t].item() for t in steps]
        V = [values[row, t].item() for t in steps] + [bootstrap[row].item()]
        delta = [r[i] + gamma * V[i + 1] - V[i] for i in range(len(steps))]
        for i, t in enumerate(steps):
            advantages[row, t] = sum(
                (gamma * lam) ** (j - i) * delta[j] for j in range(i, len(steps))
            )
            returns[row, t] = advantages[row, t] + V[i]
    return advantages, returns


@settings(max_examples=200)
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
    st.integers(0, 2**31 - 1),
)
def test_gae_equals_its_definition_on_random_batches(B, T, gamma, lam, dense, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    lengths = torch.randint(0, T + 1, (B, 1), generator=generator)
    # padding, and tools between
    mask = (torch.arange(T) < lengths) & (torch.rand(B, T, generator=generator) > 0.3)
    rewards = draw(B, T).masked_fill(~mask, 0.0) if dense else token_rewards(draw(B), mask)
    cut = torch.rand(B, generator=generator) > 0.5
    bootstrap = torch.where(cut, draw(B), 0.0)
    values = draw(B, T)
    seen = generalized_advantages(rewards, values, bootstrap, mask, gamma, lam)
    expected = slow_advantages(rewards, values, bootstrap, mask, gamma, lam)
    torch.testing.assert_close(seen.advantages, expected[0])
    torch.testing.assert_close(seen.returns, expected[1])


@pytest.mark.parametrize(
    ("case", "mask", "bootstrap", "gamma", "lam", "advantages", "returns"),
    [
        # Reward 1 at the end; values .5, .6, .8.
        (
            "γ = λ = 1: reward minus value",
            [1, 1, 1],
            0.0,
            1.0,
            1.0,
            [0.5, 0.4, 0.2],
            [1.0, 1.0, 1.0],
        ),
        # δ = .5·.6−.5, .5·.8−.6, 1−.8 = −.2, −.2, .2; γλ = .25.
        ("γ = λ = .5", [1, 1, 1], 0.0, 0.5, 0.5, [-0.2375, -0.15, 0.2], [0.2625, 0.45, 1.0]),
        (
            "cut: the value after the last token counts",
            [1, 1, 1],
            0.3,
            1.0,
            1.0,
            [0.8, 0.7, 0.5],
            [1.3, 1.3, 1.3],
        ),
        (
            "a tool's token between: no time passes",
            [1, 0, 1],
            0.0,
            0.5,
            1.0,
            [0.0, 0.0, 0.2],
            [0.5, 0.0, 1.0],
        ),
        (
            "padding behind: the reward moves forward",
            [1, 1, 0],
            0.0,
            1.0,
            1.0,
            [0.5, 0.4, 0.0],
            [1.0, 1.0, 0.0],
        ),
    ],
)
def test_gae_by_hand(case, mask, bootstrap, gamma, lam, advantages, returns):
    mask = torch.tensor([mask])
    rewards = token_rewards(torch.tensor([1.0]), mask)
    seen = generalized_advantages(
        rewards, torch.tensor([[0.5, 0.6, 0.8]]), torch.tensor([bootstrap]), mask, gamma, lam
    )
    torch.testing.assert_close(seen.advantages, torch.tensor([advantages]))
    torch.testing.assert_close(seen.returns, torch.tensor([returns]))


def test_whitened_is_mean_0_and_variance_1_over_the_mask():
    torch.manual_seed(0)
    mask = torch.rand(8, 16) > 0.4
    tensor = 10 + 0.01 * torch.randn(8, 16)  # Σ x² − n·mean² has no digits left here
    white = whiten(tensor, mask, masked_moments(tensor, mask))
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-3)
    assert white[mask].var().item() == pytest.approx(1, rel=1e-3)
    assert not white[~mask].any()


def test_whitening_survives_what_has_no_spread():
    mask = torch.tensor([[True, True, False]])
    alike = torch.tensor([[0.7, 0.7, 9.0]])
    assert torch.equal(whiten(alike, mask, masked_moments(alike, mask)), torch.zeros(1, 3))
    single = torch.tensor([[True, False, False]])
    assert torch.equal(whiten(alike, single, masked_moments(alike, single)), torch.zeros(1, 3))
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    assert torch.equal(whiten(alike, nothing, masked_moments(alike, nothing)), torch.zeros(1, 3))


def test_two_processes_compute_what_one_does_with_the_whole_batch(run_scenario):
    record = run_scenario("together.py", processes=2)
    assert record["processes"] == 2
    torch.manual_seed(0)
    tensor, mask = torch.randn(6, 5), torch.rand(6, 5) > 0.3
    expected = whiten(tensor, mask, masked_moments(tensor, mask))
    torch.testing.assert_close(torch.tensor(record["whitened"]), expected)
    assert record["explained_variance"] == pytest.approx(
        explained_variance(tensor, tensor + expected, mask), rel=1e-5
    )


@pytest.mark.parametrize("clip_range", [None, 0.3])
def test_value_gradients(clip_range):
    torch.manual_seed(0)
    values = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    old_values, returns = (
        values.detach() + 0.4 * torch.randn(4, 5),
        torch.randn(4, 5, dtype=torch.float64),
    )
    if clip_range:
        assert 0 < value_loss(values, old_values, returns, clip_range).clipped.float().mean() < 1
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old_values, returns, clip_range).loss, values
    )


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (0.2, 0.0, 1.0, 0.5 * 0.8**2, -0.8, False),  # inside the range
        # has moved far enough towards its target: clip gives .5
        (0.8, 0.0, 1.0, 0.5 * 0.5**2, 0.0, True),
        # has moved away: the full error, and the way back is open
        (0.8, 0.0, -1.0, 0.5 * 1.8**2, 1.8, False),
        (-0.9, 0.0, -1.0, 0.5 * 0.5**2, 0.0, True),
    ],
)
def test_value_clipping_by_hand(value, old, target, loss, gradient, clipped):
    value = torch.tensor([[value]], requires_grad=True)
    seen = value_loss(value, torch.tensor([[old]]), torch.tensor([[target]]), clip_range=0.5)
    seen.loss.sum().backward()
    assert seen.loss.item() == pytest.approx(loss)
    assert value.grad.item() == pytest.approx(gradient)
    assert seen.clipped.item() is clipped


def test_explained_variance():
    torch.manual_seed(0)
    returns, mask = torch.randn(6, 7), torch.rand(6, 7) > 0.3
    assert explained_variance(returns, returns, mask) == pytest.approx(1)
    assert explained_variance(torch.full((6, 7), 3.0), returns, mask) == pytest.approx(0, abs=1e-6)
    # twice the error: 1 − 4
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3, rel=1e-5)
    assert math.isnan(explained_variance(returns, torch.ones(6, 7), mask))
