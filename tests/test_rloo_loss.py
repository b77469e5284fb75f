"""RLOO's loss is TRL's, and its gradient the one that each objective asks for: against slow loops
over tokens.
"""

import math

import pytest
import torch
from support import losses
from support.losses import (
    CAP,
    EPSILON_HIGH,
    EPSILON_LOW,
    ROWS,
    give_invalid_logps,
    gradients,
    logps_of,
    our_loss,
)
from tiny import save_tiny
from trl import RLOOTrainer

from trl_qurl import QuRLRLOOTrainer
from trl_qurl.objective import OBJECTIVES
from trl_qurl.rollout.mismatch import mismatch_metrics, mismatch_sums

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("trainer")]

B, T = 6, 6
FITTING = [name for name in OBJECTIVES if name != "acr"]


def vowels(completions, **kwargs):
    return [
        sum(character in "aeiou4567" for character in completion) / 8 for completion in completions
    ]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """With a reference model, whose forward pass must not be taken for the policy's."""
    start = save_tiny(tmp_path_factory.mktemp("start"))
    trainer = losses.build(
        QuRLRLOOTrainer, tmp_path_factory.mktemp("out"), str(start), vowels, beta=0.1
    )
    with torch.no_grad():
        for parameter in trainer.ref_model.parameters():
            parameter.mul_(1.05)
    return trainer


@pytest.fixture
def batch(trainer):
    """Padding, unscored tokens, ρ on both sides of the limits, and R in and out of its range for
    either advantage.
    """
    lengths = torch.tensor([T, 3, 1, 4, 2, 5])
    batch = losses.random_batch(lengths, T) | {
        "advantages": torch.tensor([1.5, -0.7, 0.3, 0.9, -1.2, -0.4])
    }
    with torch.no_grad():
        policy_logps = logps_of(trainer, batch)
    # log R: inside, inside, above (positive advantage: clipped), below (not), below (negative:
    # clipped), above (not)
    log_ratio = torch.tensor([0.1, -0.1, 0.4, -0.5, -0.4, 0.5])
    proximal_logps = policy_logps - (log_ratio / lengths).unsqueeze(1)
    log_rho = torch.randn(B, T)
    behavior_logps = proximal_logps - log_rho
    behavior_logps[0, 3] = torch.nan
    behavior_logps[batch["completion_mask"] == 0] = 1000.0  # whatever it is padded with
    batch["old_logps"] = (proximal_logps * batch["completion_mask"]).sum(1)
    return batch | {
        "old_per_token_logps": proximal_logps,
        "sampling_per_token_logps": behavior_logps,
    }


def slow_weights(objective, log_rho):
    """One completion's weights from its logarithms of ρ, `None` where the engine gave none, token
    by token.
    """
    rho = [1.0 if value is None else math.exp(value) for value in log_rho]
    if objective in ("naive", "quantized_ratio"):
        return [1.0 for _ in rho]
    if objective == "decoupled":
        return rho
    assert objective == "tis"
    return [min(r, CAP) for r in rho]


def reference(trainer, objective, batch):
    """The value of TRL's loss, and something with the gradient A·R·Σ w·∇log π of the completions
    not clipped.
    """
    proximal_logps, behavior_logps = batch["old_per_token_logps"], batch["sampling_per_token_logps"]
    logps = logps_of(trainer, batch)
    value, surrogate, clipped = 0.0, torch.tensor(0.0), []
    for i in range(B):
        tokens = range(int(batch["completion_mask"][i].sum()))
        behavior = [behavior_logps[i, t].item() for t in tokens]
        log_rho = [
            None if b != b else proximal_logps[i, t].item() - b
            for t, b in zip(tokens, behavior, strict=True)
        ]
        below = [proximal_logps[i, t].item() for t in tokens]
        if objective == "quantized_ratio":
            below = [p if b != b else b for p, b in zip(below, behavior, strict=True)]
        ratio = math.exp(sum(logps[i, t].item() for t in tokens) - sum(below))
        advantage = batch["advantages"][i].item()
        bounded = min(max(ratio, 1 - EPSILON_LOW), 1 + EPSILON_HIGH)
        value -= min(ratio * advantage, bounded * advantage) / B
        clipped.append(bounded * advantage < ratio * advantage)
        if not clipped[-1]:
            for t, weight in zip(tokens, slow_weights(objective, log_rho), strict=True):
                surrogate = surrogate - weight * ratio * advantage * logps[i, t] / B
    return value, surrogate, clipped


@pytest.mark.parametrize("objective", FITTING)
def test_loss_and_gradient_equal_the_reference(objective, trainer, batch, monkeypatch):
    monkeypatch.setattr(trainer.args, "objective", objective)
    value, surrogate, clipped = reference(trainer, objective, batch)
    assert any(clipped) and not all(clipped)
    loss = our_loss(trainer, batch)
    # The completions' terms, |A| / B each, cancel to a tenth; each has the float32 error of a sum
    # of logarithms.
    assert loss.item() == pytest.approx(value, abs=1e-5 * batch["advantages"].abs().mean().item())
    seen, expected = gradients(trainer, loss), gradients(trainer, surrogate)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            seen[name], gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item()
        )


def check_against_trls(trainer, batch):
    theirs = RLOOTrainer._compute_loss(trainer, trainer.model, batch)
    expected = gradients(trainer, theirs)
    ours = our_loss(trainer, batch)
    seen = gradients(trainer, ours)
    return ours.item() == theirs.item() and all(
        torch.equal(seen[name], gradient) for name, gradient in expected.items()
    )


@pytest.mark.parametrize("objective", ["trl", "naive"])
def test_without_a_correction_loss_and_gradient_are_trls(objective, trainer, batch, monkeypatch):
    monkeypatch.setattr(trainer.args, "objective", objective)
    assert check_against_trls(trainer, batch)


@pytest.mark.parametrize("objective", [*FITTING, "trl"])
def test_without_a_mismatch_loss_and_gradient_are_trls(objective, trainer, batch, monkeypatch):
    monkeypatch.setattr(trainer.args, "objective", objective)
    batch["sampling_per_token_logps"] = batch["old_per_token_logps"].clone()
    assert check_against_trls(trainer, batch)


def test_a_rollout_is_scored_by_the_policy_and_measured_against_the_engine(trainer, monkeypatch):
    returned, generate = [], trainer.vllm_generation.generate
    monkeypatch.setattr(
        trainer.vllm_generation,
        "generate",
        lambda **given: returned.append(generate(**given)) or returned[0],
    )
    trainer._metrics["train"].clear()
    batch = trainer._generate_and_score_completions(ROWS)
    mask, proximal_logps = batch["completion_mask"].bool(), batch["old_per_token_logps"]
    with torch.no_grad():
        policy_logps = logps_of(trainer, batch)
    # Scoring passes over other rows at once, and so rounds otherwise; the reference model is far
    # off.
    torch.testing.assert_close(proximal_logps[mask], policy_logps[mask], rtol=0, atol=1e-4)
    sampled = [[logp for (logp,) in tokens] for tokens in returned[0][2]]
    assert [len(row) for row in sampled] == mask.sum(1).tolist()
    behavior_logps = torch.zeros_like(policy_logps)
    for row, logps in zip(behavior_logps, sampled, strict=True):
        row[: len(logps)] = torch.tensor(logps)
    torch.testing.assert_close(
        batch["sampling_per_token_logps"][mask], behavior_logps[mask], rtol=0, atol=0
    )
    sums, largest = mismatch_sums(proximal_logps, behavior_logps, mask, CAP)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    for name, value in mismatch_metrics(sums, largest.item()).items():
        assert logged[name] == pytest.approx(value, rel=2e-2, abs=1e-9), name
    assert 0 < logged["mismatch/kl_k3"] < 1e-3
    inputs = trainer._objective_inputs(batch, proximal_logps)
    rho = (proximal_logps - behavior_logps).exp()
    torch.testing.assert_close(inputs["importance_sampling_ratio"][mask], rho[mask].clamp(max=CAP))
    torch.testing.assert_close(inputs["old_logps"], (proximal_logps * mask).sum(1))


def test_evaluation_measures_in_its_own_metrics(trainer, batch):
    with losses.evaluating(trainer):
        our_loss(trainer, batch)
    assert len(trainer._metrics["eval"]["policy/approx_kl"]) == 1


def test_tokens_without_a_log_probability_are_left_out_or_an_error(trainer, monkeypatch):
    trainer._metrics["train"].clear()
    with monkeypatch.context() as patch:
        give_invalid_logps(trainer, patch, -math.inf, count=1)
        batch = trainer._generate_and_score_completions(ROWS)
    weights = trainer._objective_inputs(batch, batch["old_per_token_logps"])[
        "importance_sampling_ratio"
    ]
    assert weights[0, 0] == 1 and weights.isfinite().all()
    assert 0 < trainer._metrics["train"]["mismatch/invalid_share"][0] < 0.01
    give_invalid_logps(trainer, monkeypatch, None)
    with pytest.raises(RuntimeError, match=r"NaN or infinite for 100\.0% of this rollout's tokens"):
        trainer._generate_and_score_completions(ROWS)
