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
    assert_close,
    assert_equal,
    gradients,
    logps_of,
    our_loss,
    vowels,
)
from tiny import tiny_model, tiny_tokenizer
from trl import RLOOTrainer

from trl_qurl import QuRLRLOOTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("trainer")]

B = 6
T = 6


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return losses.build(
        QuRLRLOOTrainer,
        tmp_path_factory.mktemp("out"),
        tiny_model(),
        vowels,
        None,
        tiny_tokenizer(),
        beta=0.0,
    )


@pytest.fixture
def batch(trainer):
    """Padding, unscored tokens, ρ on both sides of the limits, and R in and out of its range for
    either advantage.
    """
    lengths = torch.tensor([T, 3, 1, 4, 2, 5])
    batch = losses.random_batch(lengths, T)
    batch["advantages"] = torch.tensor([1.5, -0.7, 0.3, 0.9, -1.2, -0.4])
    with torch.no_grad():
        policy_logps = logps_of(trainer, batch)
    # log R: inside, inside, above (positive advantage: clipped), below (not), below (negative:
    # clipped), above (not)
    log_ratio = torch.tensor([0.1, -0.1, 0.4, -0.5, -0.4, 0.5])
    proximal_logps = policy_logps - (log_ratio / lengths).unsqueeze(1)
    batch["old_logps"] = (proximal_logps * batch["completion_mask"]).sum(1)
    losses.score(batch, proximal_logps, torch.randn(B, T))
    return batch


def slow_weight(objective, log_rho):
    """A token's weight from the logarithm of ρ."""
    if objective in ("naive", "quantized_ratio"):
        return 1.0
    rho = math.exp(log_rho)
    return rho if objective == "decoupled" else min(rho, CAP)


def reference(trainer, objective, batch):
    """The value of TRL's loss, and something with the gradient A·R·Σ w·∇log π of the completions
    not clipped.
    """
    logps = logps_of(trainer, batch)
    value = 0.0
    surrogate = torch.tensor(0.0)
    clipped = []
    for i in range(B):
        log_ratio = 0.0
        weighted = torch.tensor(0.0)
        for t in range(int(batch["completion_mask"][i].sum())):
            proximal = batch["old_per_token_logps"][i, t].item()
            behavior = batch["sampling_per_token_logps"][i, t].item()
            if math.isnan(behavior):
                behavior = proximal
            below = behavior if objective == "quantized_ratio" else proximal
            log_ratio += logps[i, t].item() - below
            weighted = weighted + slow_weight(objective, proximal - behavior) * logps[i, t]
        ratio = math.exp(log_ratio)
        advantage = batch["advantages"][i].item()
        bounded = min(max(ratio, 1 - EPSILON_LOW), 1 + EPSILON_HIGH)
        value -= min(ratio * advantage, bounded * advantage) / B
        clipped.append(bounded * advantage < ratio * advantage)
        if not clipped[-1]:
            surrogate = surrogate - ratio * advantage * weighted / B
    assert any(clipped)
    assert not all(clipped)
    return value, surrogate


@pytest.mark.parametrize("objective", ["tis", "decoupled", "quantized_ratio", "naive"])
def test_loss_and_gradient_equal_the_reference(objective, trainer, batch, monkeypatch):
    monkeypatch.setattr(trainer.args, "objective", objective)
    value, surrogate = reference(trainer, objective, batch)
    loss = our_loss(trainer, batch)
    # The completions' terms, |A| / B each, cancel to a tenth; each has the float32 error of a sum
    # of logarithms.
    assert loss.item() == pytest.approx(value, abs=1e-5 * batch["advantages"].abs().mean().item())
    assert_close(gradients(trainer, loss), gradients(trainer, surrogate), 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("objective", "has_mismatch"),
    [
        ("trl", True),
        ("naive", True),
        ("tis", False),
        ("decoupled", False),
        ("quantized_ratio", False),
    ],
)
def test_without_a_correction_or_a_mismatch_loss_and_gradient_are_trls(
    objective, has_mismatch, trainer, batch, monkeypatch
):
    monkeypatch.setattr(trainer.args, "objective", objective)
    if not has_mismatch:
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"].clone()
    theirs = RLOOTrainer._compute_loss(trainer, trainer.model, batch)
    ours = our_loss(trainer, batch)
    assert ours.item() == theirs.item()
    assert_equal(gradients(trainer, ours), gradients(trainer, theirs))
