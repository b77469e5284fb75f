"""The coefficient of adaptive weights: arithmetic done by hand, its limits, and what must not change it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loss import adaptive_coefficient

from trl_qurl.importance import mixing_coefficient, weight_sums
from trl_qurl.objective import surrogate_terms

CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
NONE = float("nan")


def batch(log_ratios):
    """Log-probabilities with these log ρ, NaN where there is none."""
    behavior = torch.full(torch.tensor(log_ratios).shape, -3.0, dtype=torch.float64)
    log_rho = torch.tensor(log_ratios, dtype=torch.float64)
    return behavior + log_rho.nan_to_num(0.0), behavior.masked_fill(log_rho.isnan(), NONE)


def coefficient(proximal, behavior, cap=2.0, floor=None):
    return mixing_coefficient(weight_sums(proximal, behavior, cap, floor)).item()


def random_batch(seed, spread, B=8, T=5):
    g = torch.Generator().manual_seed(seed)
    log_rho = spread * torch.randn(B, T, generator=g, dtype=torch.float64)
    log_rho[torch.rand(B, T, generator=g) < 0.3] = NONE
    return batch(log_rho.tolist())


def test_by_hand():
    # ρ = 2, 1/2 and 1, and C = 1.5, so w − 1 = 1/2, −1/2 and 0; the third completion has no token.
    # d = 2·(ln 2)²/3, v = 2·(1/4)/3, and n = 2 · 3.5² / (3 · 5.25).
    proximal, behavior = batch([[math.log(2), -math.log(2)], [0.0, NONE], [NONE, NONE]])
    d, v, n = 2 * math.log(2) ** 2 / 3, 1 / 6, 2 * 3.5**2 / (3 * 5.25)
    expected = d**2 / (d**2 + v / n)
    assert coefficient(proximal, behavior, cap=1.5) == pytest.approx(expected, rel=1e-12)
    weight = surrogate_terms("ais", proximal, behavior, cap=1.5, **CLIP).weight
    by_hand = torch.ones(3, 2, dtype=torch.float64)
    by_hand[0] += torch.tensor([expected / 2, -expected / 2], dtype=torch.float64)
    torch.testing.assert_close(weight, by_hand, rtol=1e-12, atol=0)
    # A floor of 1 takes away what the second weight adds: v halves.
    floored = d**2 / (d**2 + v / 2 / n)
    assert coefficient(proximal, behavior, cap=1.5, floor=1.0) == pytest.approx(floored, rel=1e-12)


@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(1e-4, 5.0), cap=st.floats(1.01, 50.0))
@settings(max_examples=100, deadline=None)
def test_it_is_that_of_the_slow_formula_and_in_its_interval(seed, spread, cap):
    proximal, behavior = random_batch(seed, spread)
    value = coefficient(proximal, behavior, cap)
    assert 0 <= value <= 1
    expected = adaptive_coefficient((proximal - behavior).tolist(), cap)
    assert value == pytest.approx(expected, rel=1e-9)


@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0.01, 3.0))
@settings(max_examples=30, deadline=None)
def test_neither_order_nor_parts_nor_padding_change_it(seed, spread):
    proximal, behavior = random_batch(seed, spread)
    value = coefficient(proximal, behavior)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    assert coefficient(proximal[order], behavior[order]) == pytest.approx(value, rel=1e-12)
    assert coefficient(proximal.flip(1), behavior.flip(1)) == pytest.approx(value, rel=1e-12)
    parts = sum(weight_sums(*part, 2.0) for part in zip(proximal.split(3), behavior.split(3), strict=True))
    assert mixing_coefficient(parts).item() == pytest.approx(value, rel=1e-12)
    padded = torch.nn.functional.pad(behavior, (0, 4), value=NONE)
    assert coefficient(torch.nn.functional.pad(proximal, (0, 4)), padded) == pytest.approx(value, rel=1e-12)
    # A part that is as the whole says of the whole what it says itself, given how many there are.
    doubled = coefficient(torch.cat([proximal] * 2), torch.cat([behavior] * 2))
    assert mixing_coefficient(2 * weight_sums(proximal, behavior, 2.0)).item() == pytest.approx(doubled, rel=1e-12)


def test_each_diagnostic_matters():
    """Divergence and samples raise it, amplification and an effective sample size that collapses lower it."""
    #                     completions, tokens, (log ρ)², ρ, ρ², (w − 1)²
    usual = torch.tensor([8.0, 40.0, 2.0, 40.0, 42.0, 1.5])
    value = mixing_coefficient(usual)
    for changed, factor, is_raised in ((2, 2.0, True), (5, 2.0, False), (4, 10.0, False), (0, 2.0, True)):
        sums = usual.clone()
        sums[changed] *= factor
        assert (mixing_coefficient(sums) > value) == is_raised, f"sum {changed}"
        assert 0 < mixing_coefficient(sums) < 1


def test_it_falls_to_none_where_the_variance_explodes():
    """One token whose weight is not cut: the larger it is, the more it would be alone."""
    values = []
    for log_rho in (2.0, 4.0, 6.0, 8.0, 10.0):
        proximal, behavior = batch([[0.1, -0.1, log_rho], [0.1, -0.1, 0.1]])
        values.append(coefficient(proximal, behavior, cap=1e6))
    assert values == sorted(values, reverse=True) and values[-1] < 1e-4
    assert coefficient(*batch([[0.1, -0.1, 10.0], [0.1, -0.1, 0.1]]), cap=2.0) > 0.1, "a cap limits it"


def test_small_mismatch_is_left_alone_and_larger_is_corrected():
    values = [coefficient(*random_batch(0, spread, B=256)) for spread in (0.001, 0.01, 0.1, 0.3, 1.0)]
    assert values == sorted(values) and values[0] < 1e-3 and values[-1] > 0.98


@pytest.mark.parametrize("log_ratios", [[[0.0, 0.0]], [[NONE, NONE]], [[]]], ids=["no mismatch", "unscored", "empty"])
def test_without_anything_to_correct_it_is_zero(log_ratios):
    assert coefficient(*batch(log_ratios)) == 0.0


def test_ratios_that_overflow_leave_a_number():
    proximal, behavior = torch.tensor([[-1.0, -1.0, -500.0]]), torch.tensor([[-500.0, -1.0, -1.0]])
    assert 0 <= mixing_coefficient(weight_sums(proximal, behavior, 2.0).float()).item() <= 1
    assert surrogate_terms("ais", proximal, behavior, cap=2.0, **CLIP).weight.isfinite().all()


def test_the_ends_are_naive_and_tis():
    proximal, behavior = random_batch(3, 1.0)
    for value, other in ((0.0, "naive"), (1.0, "tis"), (torch.tensor(0.0), "naive"), (torch.tensor(1.0), "tis")):
        terms = surrogate_terms("ais", proximal, behavior, cap=2.0, floor=0.1, coefficient=value, **CLIP)
        expected = surrogate_terms(other, proximal, behavior, cap=2.0, floor=0.1, **CLIP)
        for ours, theirs in zip(terms, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    proximal.requires_grad_()
    assert not surrogate_terms("ais", proximal, behavior, cap=2.0, **CLIP).weight.requires_grad


def test_a_missing_cap_is_refused():
    with pytest.raises(ValueError, match="finite and above 0"):
        weight_sums(*batch([[0.1]]), None)
