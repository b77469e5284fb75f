"""The objectives against arithmetic done by hand, and the two ways of computing them against each
other.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loss import reference_loss

from trl_qurl.objective import (
    LARGEST_LOG_RATIO,
    OBJECTIVES,
    Objective,
    SurrogateTerms,
    get_objective,
    importance_ratio,
    surrogate_terms,
)

SIGNS = torch.tensor([[1.0], [-1.0]])  # advantages of one sequence: positive, negative
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
LOSS_TYPES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {"max_completion_length": 9},
    "dapo": {"num_items": 13},
}


def log(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def clipped_surrogate(
    terms: SurrogateTerms, policy_logps, advantages, epsilon_low=0.2, epsilon_high=0.28
):
    """TRL's own lines, with our terms: (B, T)."""
    coef_1 = torch.exp(policy_logps - terms.old_logps)
    coef_2 = torch.clamp(coef_1, 1 - epsilon_low, 1 + epsilon_high)
    return (
        torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1)) * terms.weight
    )


def trl_aggregate(values, mask, loss_type, max_completion_length=None, num_items=None):
    """TRL's own aggregations, one micro-batch, no accumulation."""
    if loss_type == "grpo":
        return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    total = (values * mask).sum()
    if loss_type == "bnpo":
        return total / mask.sum().clamp(min=1.0)
    return total / (values.size(0) * max_completion_length if loss_type == "dr_grpo" else num_items)


def rollout(seed, B=4, T=7, max_rho=1e5, missing=0.2):
    """Random log-probabilities with ρ in [1/max_rho, max_rho], R from 0.2 to 5, padding, and NaN
    behavior.
    """
    g = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return torch.empty(B, T, dtype=torch.float64).uniform_(low, high, generator=g)

    proximal = uniform(-20, -0.1)
    behavior = proximal - uniform(-math.log(max_rho), math.log(max_rho))
    behavior[torch.rand(B, T, generator=g) < missing] = float("nan")
    policy = (proximal + uniform(-1.6, 1.6)).requires_grad_()
    advantages = torch.randn(B, generator=g, dtype=torch.float64)
    lengths = torch.randint(0, T + 1, (B, 1), generator=g)
    mask = (torch.arange(T) < lengths).to(torch.float64)
    return policy, proximal, behavior, advantages, mask


# One token, π_prox = 0.06, π_behav = 0.01: ρ = 6. With C = 2: r = 1/3, and ε = 0.2 lifts 1.2 to
# 3.6.
@pytest.mark.parametrize(
    ("policy", "advantage", "expected"),
    [
        # R = 0.09 / 0.06 = 1.5, R̂ = 9. clip(R) = 1.2 without, 1.5 with the lifted bound.
        # acr 2·1.5, tis 2·1.2, decoupled 6·1.2, quantized_ratio min(9, 1.2), naive 1.2
        (
            0.09,
            1.0,
            {"acr": 3.0, "tis": 2.4, "decoupled": 7.2, "quantized_ratio": 1.2, "naive": 1.2},
        ),
        # A = −1: min picks the unclipped −1.5 (−9 for R̂).
        (
            0.09,
            -1.0,
            {"acr": -3.0, "tis": -3.0, "decoupled": -9.0, "quantized_ratio": -9.0, "naive": -1.5},
        ),
        # R = 4 passes the lifted bound as well: acr 2·3.6.
        (
            0.24,
            1.0,
            {"acr": 7.2, "tis": 2.4, "decoupled": 7.2, "quantized_ratio": 1.2, "naive": 1.2},
        ),
        # R = 0.5, A = −1: min(−0.5, −0.8): the lower bound holds for all. R̂ = 3: min(−3, −1.2).
        (
            0.03,
            -1.0,
            {"acr": -1.6, "tis": -1.6, "decoupled": -4.8, "quantized_ratio": -3.0, "naive": -0.8},
        ),
    ],
)
def test_one_token_by_hand(policy, advantage, expected):
    advantages = torch.tensor([advantage], dtype=torch.float64)
    for name, value in expected.items():
        clip = {"epsilon_low": 0.2, "epsilon_high": 0.2}
        terms = surrogate_terms(name, log(0.06), log(0.01), advantages, cap=2.0)
        assert clipped_surrogate(terms, log(policy), advantages, **clip).item() == pytest.approx(
            value, rel=1e-12
        )
        args = (log(policy), log(0.06), log(0.01), advantages, torch.ones(1, 1))
        loss = reference_loss(name, *args, loss_type="bnpo", cap=2.0, **clip)
        assert loss.item() == pytest.approx(-value, rel=1e-12)


def test_expected_table_names_every_objective():
    assert set(OBJECTIVES) == {"acr", "tis", "decoupled", "quantized_ratio", "naive"}
    assert all(objective.name == name for name, objective in OBJECTIVES.items())


def test_importance_ratio_by_hand():
    # 0.2 / 0.1 = 2, 0.1 / 0.4 = 0.25, nothing known: 1
    rho = importance_ratio(log(0.2, 0.1, 0.3), log(0.1, 0.4, float("nan")))
    torch.testing.assert_close(rho, torch.tensor([[2.0, 0.25, 1.0]], dtype=torch.float64))


def test_acr_by_hand():
    # C = 2, ρ = 0.5, 2, 3, 10. Above C and with A > 0: the ratio is to π_prox/r = π_prox·ρ/C, and
    # its weight is ρ.
    behavior = log(0.5, 0.125, 0.1, 0.025)
    up, down = (
        surrogate_terms("acr", log(0.25, 0.25, 0.3, 0.25), behavior, A, cap=2.0) for A in SIGNS
    )
    torch.testing.assert_close(up.old_logps, log(0.25, 0.25, 0.45, 1.25))
    torch.testing.assert_close(up.weight, torch.tensor([[0.5, 2, 3, 10]], dtype=torch.float64))
    assert torch.equal(down.old_logps, log(0.25, 0.25, 0.3, 0.25)), "with A < 0 no upper bound acts"
    torch.testing.assert_close(down.weight, torch.tensor([[0.5, 2, 2, 2]], dtype=torch.float64))
    # Advantages per token.
    mixed = surrogate_terms(
        "acr", log(0.3, 0.3, 0.1), log(0.1, 0.1, 0.4), torch.tensor([[1, 0, 1]]), cap=2
    )
    torch.testing.assert_close(mixed.old_logps, log(0.45, 0.3, 0.1))
    torch.testing.assert_close(mixed.weight, torch.tensor([[3, 2, 0.25]], dtype=torch.float64))


def test_a_ratio_that_would_overflow_is_limited():
    # exp(200) is infinite in float32; 0 · inf would be NaN where R is tiny.
    terms = surrogate_terms(
        "acr", torch.zeros(1, 2), torch.full((1, 2), -200.0), torch.ones(1), cap=2.0
    )
    assert terms.weight.tolist() == [[pytest.approx(math.exp(LARGEST_LOG_RATIO))] * 2]
    values = clipped_surrogate(terms, torch.tensor([[0.0, -300.0]]), torch.ones(1))
    assert values.tolist() == [[pytest.approx(2.0, rel=1e-5), 0.0]], "C·R, as in Eq. 9"


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("grpo", -2.0), ("bnpo", -1.5), ("dr_grpo", -0.75), ("dapo", -0.6)]
)
def test_aggregations_by_hand(loss_type, expected):
    # R = 1, so each token is worth its advantage: sequence 1 has three tokens of 1, sequence 2 one
    # token of 3. grpo (3/3 + 3/1)/2; bnpo 6/4; dr_grpo 6/(2·4); dapo 6/10. The padding's ratio of
    # e⁹ must not count.
    proximal = torch.full((2, 3), -1.0)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    policy = torch.where(mask.bool(), proximal, 8.0)
    advantages = torch.tensor([1.0, 3.0])
    for A in (advantages, advantages.unsqueeze(1).expand(2, 3)):
        loss = reference_loss(
            "naive", policy, proximal, proximal, A, mask, loss_type=loss_type, cap=None, **CLIP,
            max_completion_length=4, num_items=10,
        )  # fmt: skip
        assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@given(seed=st.integers(0, 2**32 - 1), cap=st.floats(0.5, 10.0))
@settings(max_examples=15, deadline=None)
def test_terms_in_the_plain_surrogate_give_the_reference_loss_and_gradient(
    objective, loss_type, seed, cap
):
    policy, proximal, behavior, advantages, mask = rollout(seed)
    numbers = LOSS_TYPES[loss_type]

    terms = surrogate_terms(objective, proximal, behavior, advantages, cap=cap)
    loss = -trl_aggregate(clipped_surrogate(terms, policy, advantages), mask, loss_type, **numbers)
    expected = reference_loss(
        objective,
        policy,
        proximal,
        behavior,
        advantages,
        mask,
        loss_type=loss_type,
        cap=cap,
        **CLIP,
        **numbers,
    )

    # tokens of both signs may cancel
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    (gradient,), (expected_gradient,) = (
        torch.autograd.grad(loss, policy),
        torch.autograd.grad(expected, policy),
    )
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=0)


@given(seed=st.integers(0, 2**32 - 1), cap=st.floats(1.0, 10.0))
@settings(max_examples=50, deadline=None)
def test_acr_is_tis_to_the_last_bit_where_the_cap_cuts_nothing(seed, cap):
    _, proximal, behavior, advantages, _ = rollout(seed, max_rho=cap)
    proximal, behavior = proximal.float(), behavior.float()
    cap = max(cap, importance_ratio(proximal, behavior).max().item())
    acr, tis = (
        surrogate_terms(name, proximal, behavior, advantages, cap=cap) for name in ("acr", "tis")
    )
    assert all(torch.equal(a, t) for a, t in zip(acr, tis, strict=True))


@pytest.mark.parametrize("cap", [None, math.inf])
def test_acr_and_tis_without_a_cap_are_decoupled(cap):
    _, *tokens, _ = rollout(0)
    expected = surrogate_terms("decoupled", *tokens, cap=2.0)
    for name in ("acr", "tis"):
        assert all(
            torch.equal(*pair)
            for pair in zip(surrogate_terms(name, *tokens, cap=cap), expected, strict=True)
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
def test_acr_equals_equation_9_as_printed(dtype, tolerance):
    """A million tokens, ρ from 1e-5 to 1e5."""
    policy, proximal, behavior, advantages, _ = (
        part.detach().to(dtype) for part in rollout(0, B=1000, T=1000, missing=0.01)
    )
    terms = surrogate_terms("acr", proximal, behavior, advantages, cap=2.0)
    R, rho, A = (
        (policy - proximal).exp(),
        importance_ratio(proximal, behavior),
        advantages.unsqueeze(1),
    )
    r = (2.0 / rho).clamp(max=1)  # Eq. 6-7
    # Eq. 9
    expected = rho.clamp(max=2.0) * torch.minimum(R * A, R.clamp(min=0.8).minimum(1.28 / r) * A)
    assert (rho > 2).float().mean() > 0.3 and ((R > 1.28) & (R * r <= 1.28)).float().mean() > 0.1
    torch.testing.assert_close(
        clipped_surrogate(terms, policy, advantages), expected, rtol=tolerance, atol=0
    )


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_without_mismatch_all_objectives_are_naive(seed):
    policy, proximal, behavior, advantages, mask = rollout(seed)
    for no_mismatch in (proximal, torch.full_like(behavior, float("nan"))):
        losses = {
            name: reference_loss(
                name,
                policy,
                proximal,
                no_mismatch,
                advantages,
                mask,
                loss_type="grpo",
                cap=2.0,
                **CLIP,
            )
            for name in OBJECTIVES
        }
        assert all(torch.equal(loss, losses["naive"]) for loss in losses.values())
        terms = [
            surrogate_terms(name, proximal, no_mismatch, advantages, cap=2.0) for name in OBJECTIVES
        ]
        assert all(
            torch.equal(a, b) for other in terms for a, b in zip(other, terms[-1], strict=True)
        )


def test_no_gradient_flows_through_the_sampling():
    proximal, behavior = log(0.06).requires_grad_(), log(0.01).requires_grad_()
    for name in OBJECTIVES:
        terms = surrogate_terms(name, proximal, behavior, torch.ones(1), cap=2.0)
        assert not any(term.requires_grad for term in terms)
        loss = reference_loss(
            name, log(0.09).requires_grad_(), proximal, behavior, torch.ones(1), torch.ones(1, 1),
            loss_type="bnpo", cap=2.0, **CLIP,
        )  # fmt: skip
        loss.backward()
        assert proximal.grad is None and behavior.grad is None


def test_unknown_objective_lists_the_known_ones():
    with pytest.raises(ValueError, match="'ppo'.*acr, tis, decoupled, quantized_ratio, naive"):
        get_objective("ppo")


@pytest.mark.parametrize("objective", ["acr", "tis"])
@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_an_impossible_cap_is_refused(objective, cap):
    with pytest.raises(ValueError, match="give a ratio above 0"):
        surrogate_terms(objective, log(0.1), log(0.1), torch.ones(1), cap=cap)


@pytest.mark.parametrize("correction", ["none", "full"])
def test_an_upper_bound_is_lifted_only_where_a_cap_cuts(correction):
    with pytest.raises(
        ValueError, match=f"'mine' has lifts_upper_bound=True with correction='{correction}'"
    ):
        Objective("mine", "here", correction=correction, lifts_upper_bound=True)


def test_shapes_are_checked_and_named():
    with pytest.raises(ValueError, match=r"proximal_logps \(2, 3\), behavior_logps \(2, 4\)"):
        surrogate_terms("acr", torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2), cap=2.0)
    with pytest.raises(ValueError, match=r"\(B, T\)"):
        importance_ratio(torch.zeros(3), torch.zeros(3))
