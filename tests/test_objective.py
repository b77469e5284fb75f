"""The objectives against arithmetic done by hand, and against the equations as printed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loss import reference_objective

from trl_qurl.objective import (
    LARGEST_LOG_RATIO,
    OBJECTIVES,
    Objective,
    get_objective,
    surrogate_terms,
)

CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
NAMES = ("acr", "tis", "decoupled", "quantized_ratio", "naive")


def log(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def clipped_surrogate(
    terms,
    policy_logps,
    advantages,
    epsilon_low=0.2,
    epsilon_high=0.28,
):
    """TRL's own lines, with our terms: (B, T)."""
    coef_1 = torch.exp(policy_logps - terms.old_logps)
    coef_2 = torch.clamp(coef_1, 1 - epsilon_low, 1 + epsilon_high)
    advantages = advantages.unsqueeze(1)
    return torch.min(coef_1 * advantages, coef_2 * advantages) * terms.weight


def rollout(seed):
    """Random log-probabilities with ρ in [1e-5, 1e5], R from 0.2 to 5, and NaN for a fifth
    of the actor's.
    """
    g = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return torch.empty(4, 7, dtype=torch.float64).uniform_(low, high, generator=g)

    proximal = uniform(-20, -0.1)
    behavior = proximal - uniform(-11.5, 11.5)  # ln(1e5) = 11.5
    behavior[torch.rand(4, 7, generator=g) < 0.2] = torch.nan
    policy = (proximal + uniform(-1.6, 1.6)).requires_grad_()
    advantages = torch.randn(4, generator=g, dtype=torch.float64)
    return policy, proximal, behavior, advantages


# One token, π_prox = 0.06, π_behav = 0.01: ρ = 6. With C = 2: r = 1/3, and ε = 0.2 lifts 1.2 to
# 3.6. In the order of `NAMES`.
@pytest.mark.parametrize(
    ("policy", "advantage", "expected"),
    [
        # R = 0.09 / 0.06 = 1.5, R̂ = 9. clip(R) = 1.2 without, 1.5 with the lifted bound.
        # acr 2·1.5, tis 2·1.2, decoupled 6·1.2, quantized_ratio min(9, 1.2), naive 1.2
        (0.09, 1.0, (3.0, 2.4, 7.2, 1.2, 1.2)),
        # A = −1: min picks the unclipped −1.5 (−9 for R̂).
        (0.09, -1.0, (-3.0, -3.0, -9.0, -9.0, -1.5)),
        # R = 4 passes the lifted bound as well: acr 2·3.6.
        (0.24, 1.0, (7.2, 2.4, 7.2, 1.2, 1.2)),
        # R = 0.5, A = −1: min(−0.5, −0.8): the lower bound holds for all. R̂ = 3: min(−3, −1.2).
        (0.03, -1.0, (-1.6, -1.6, -4.8, -3.0, -0.8)),
    ],
)
def test_one_token_by_hand(policy, advantage, expected):
    assert set(OBJECTIVES) == set(NAMES)
    clip = {"epsilon_low": 0.2, "epsilon_high": 0.2}
    rollout = (log(0.06), log(0.01), torch.tensor([advantage], dtype=torch.float64))
    for name, value in zip(NAMES, expected, strict=True):
        terms = surrogate_terms(name, *rollout, cap=2.0)
        ours = clipped_surrogate(terms, log(policy), rollout[-1], **clip)
        assert ours.item() == pytest.approx(value, rel=1e-12)
        printed = reference_objective(name, log(policy), *rollout, cap=2.0, **clip)
        assert printed.item() == pytest.approx(value, rel=1e-12)


def test_acr_with_an_advantage_per_token_by_hand():
    # C = 2, ρ = 3, 3, 0.25. Above C and with A > 0: the ratio is to π_prox/r = π_prox·ρ/C, and its
    # weight is ρ.
    behavior = log(0.1, 0.1, 0.4)
    advantages = torch.tensor([[1, 0, 1]])
    mixed = surrogate_terms("acr", log(0.3, 0.3, 0.1), behavior, advantages, cap=2)
    torch.testing.assert_close(mixed.old_logps, log(0.45, 0.3, 0.1))
    torch.testing.assert_close(mixed.weight, torch.tensor([[3, 2, 0.25]], dtype=torch.float64))


def test_a_ratio_that_would_overflow_is_limited():
    # exp(200) is infinite in float32; 0 · inf would be NaN where R is tiny.
    behavior = torch.full((1, 2), -200.0)
    terms = surrogate_terms("acr", torch.zeros(1, 2), behavior, torch.ones(1), cap=2.0)
    assert terms.weight.tolist() == [[pytest.approx(math.exp(LARGEST_LOG_RATIO))] * 2]
    values = clipped_surrogate(terms, torch.tensor([[0.0, -300.0]]), torch.ones(1))
    assert values.tolist() == [[pytest.approx(2.0, rel=1e-5), 0.0]], "C·R, as in Eq. 9"


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(seed=st.integers(0, 2**32 - 1), cap=st.floats(0.5, 10.0))
@settings(max_examples=60, deadline=None)
def test_terms_in_the_plain_surrogate_give_the_reference_and_its_gradient(objective, seed, cap):
    policy, *rollout_tensors = rollout(seed)
    rollout_tensors[0].requires_grad_()
    terms = surrogate_terms(objective, *rollout_tensors, cap=cap)
    assert not any(term.requires_grad for term in terms), "no gradient flows through sampling"
    ours = clipped_surrogate(terms, policy, rollout_tensors[-1])
    printed = reference_objective(objective, policy, *rollout_tensors, cap=cap, **CLIP)
    torch.testing.assert_close(ours, printed, rtol=1e-12, atol=0)
    gradient = torch.autograd.grad(ours.sum(), policy)
    expected = torch.autograd.grad(printed.sum(), policy)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("cap", [None, math.inf])
def test_acr_and_tis_without_a_cap_are_decoupled(cap):
    _, *tensors = rollout(0)
    expected = surrogate_terms("decoupled", *tensors, cap=2.0)
    for name in ("acr", "tis"):
        terms = surrogate_terms(name, *tensors, cap=cap)
        torch.testing.assert_close(terms, expected, rtol=0, atol=0)


def test_unknown_objective_lists_the_known_ones():
    with pytest.raises(ValueError, match="'ppo'.*acr, tis, decoupled, quantized_ratio, naive"):
        get_objective("ppo")


@pytest.mark.parametrize("correction", ["none", "full"])
def test_an_upper_bound_is_lifted_only_where_a_cap_cuts(correction):
    with pytest.raises(ValueError, match=f"'mine'.*lifts_upper_bound=True.*'{correction}'"):
        Objective("mine", "here", correction=correction, lifts_upper_bound=True)
