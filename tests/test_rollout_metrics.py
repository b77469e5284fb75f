"""Mismatch and weight-change metrics, by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from tiny import tiny_model

from trl_qurl.rollout.cost import RolloutCost
from trl_qurl.rollout.mismatch import MismatchTally, mismatch_metrics, mismatch_sums
from trl_qurl.rollout.samples import Listing, Samples
from trl_qurl.trainers.checks import samples as module
from trl_qurl.trainers.checks.samples import scored_samples
from trl_qurl.trainers.dynamic_sampling import FilledBatch, Sample
from trl_qurl.trainers.scoring import Rollout, loss_metrics


def test_mismatch_by_hand():
    # Two learned tokens with ρ = 4 and ρ = 1/2; the third is padding, and as many as are scored
    # were not scored by the engine.
    proximal = torch.tensor([[math.log(4.0), math.log(0.5), 50.0, 1.0, 1.0]])
    behavior = torch.tensor([[0.0, 0.0, 0.0, math.nan, math.nan]])
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    metrics = mismatch_metrics(*mismatch_sums(proximal, behavior, mask, cap=2.0))
    expected = {
        "tokens": 2,
        "kl_k1": -math.log(2) / 2,  # -(ln 4 + ln 1/2) / 2
        "kl_k3": (2.5 - math.log(2)) / 2,  # (4 - 1 - ln 4 + 1/2 - 1 - ln 1/2) / 2
        # sqrt(Σ k3²) / n, of k3 = 3 - ln 4 and ln 2 - 1/2
        "kl_k3_error": math.hypot(3 - math.log(4), math.log(2) - 0.5) / 2,
        "ratio_mean": 2.25,
        "ratio_max": 4.0,
        "capped_share": 0.5,
        "contradicted_share": 0.0,
        "invalid_share": 0.5,
        "ess": 4.5**2 / (2 * 16.25),  # (Σρ)² / (n Σρ²)
    }
    named = {f"mismatch/{name}": value for name, value in expected.items()}
    assert metrics == pytest.approx(named)


def test_contradicted_tokens_by_hand():
    # The engine is sure of a token, and the trainer gives it less than e^-2 of that: the first
    # only. The second is at e^-1.9, the engine is not sure of the third, the fourth is padding.
    behavior = torch.tensor([[-0.6, -0.6, -0.7, -0.6]])
    proximal = behavior + torch.tensor([[-2.1, -1.9, -5.0, -5.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    metrics = mismatch_metrics(*mismatch_sums(proximal, behavior, mask, cap=2.0))
    assert metrics["mismatch/contradicted_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6])
def test_a_small_kl_keeps_its_digits(size):
    """ρ − 1 − log ρ is x²/2 + x³/6 for x = log ρ; float32 knows ρ itself to 6e-8 only, which x² is
    far below.
    """
    behavior = torch.full((8, 512), -0.125)
    proximal = behavior + size * torch.linspace(-1, 1, 8 * 512).view(8, 512)
    everywhere = torch.ones(8, 512, dtype=torch.bool)
    x = proximal.double() - behavior.double()
    expected = (x**2 / 2 + x**3 / 6).mean().item()
    tally = MismatchTally(Accelerator(cpu=True))
    tally.add(proximal, behavior, everywhere, cap=2.0)
    assert tally.pop()["mismatch/kl_k3"] == pytest.approx(expected, rel=1e-4)
    stale = loss_metrics(proximal, behavior, {"completion_mask": everywhere}, lambda sums: sums)
    assert stale["policy/approx_kl"] == pytest.approx(expected, rel=1e-4)


def test_the_only_token_that_is_learned():
    learned = {"completion_mask": torch.tensor([[1, 0]])}
    metrics = loss_metrics(torch.ones(1, 2), torch.zeros(1, 2), learned, lambda sums: sums)
    assert metrics == {"policy/approx_kl": pytest.approx(math.e - 2)}


def test_a_log_probability_without_bounds_leaves_numbers():
    # below vLLM's stand-in for -inf, and no number of a sampled token
    behavior = torch.tensor([[-0.5, -5000.0]])
    tally = MismatchTally(Accelerator(cpu=True))
    tally.add(torch.full_like(behavior, -0.5), behavior, behavior < 0, cap=2.0)
    assert all(math.isfinite(value) for value in tally.pop().values())


def test_no_scored_token_gives_no_metrics():
    nothing = torch.zeros(1, 2)
    assert mismatch_metrics(*mismatch_sums(nothing, nothing, nothing.bool(), 2.0)) == {}


# A few completions, for a proof
# --------------------------------------------------------------------------------------------------


def trainer_of(policy, temperature=1.0):
    generation = SimpleNamespace(temperature=temperature)
    return SimpleNamespace(model=policy, vllm_generation=generation, _listed_count=0)


def samples_of(prompts, completions, behavior_logps):
    rows = zip(behavior_logps, completions, strict=True)
    listings = [Listing.of(logps, ids, len(ids)) for logps, ids in rows]
    return Samples(prompts, completions, listings, has_images=False)


def test_samples_are_scored_as_the_policy_finds_them():
    policy = tiny_model(attention_dropout=0.5).train()
    prompts = [[7, 8, 9], [5], [6, 7]]
    completions = [[12, 13], [], [30]]
    behavior = [[-2.0, math.nan], [], [-9999.0]]  # -9999: a server's stand-in for -inf
    samples = samples_of(prompts, completions, behavior)
    scored = list(scored_samples(trainer_of(policy, temperature=0.7), samples))
    assert policy.training, "the pass left the policy in evaluation mode"
    assert scored[0].behavior_logps[0].tolist() == pytest.approx([-2.0, math.nan], nan_ok=True)
    assert scored[2].behavior_logps.isnan().all()
    for prompt, completion, each in zip(prompts, completions, scored, strict=True):
        logits = policy.eval()(torch.tensor([prompt + completion])).logits[0] / 0.7
        log_probs = logits.log_softmax(-1)[len(prompt) - 1 :]
        expected = log_probs[range(len(completion)), completion]
        torch.testing.assert_close(each.proximal_logps[0], expected, rtol=0, atol=1e-5)
        assert each.mask.all()


def test_a_few_samples_of_different_prompts_are_scored(monkeypatch):
    monkeypatch.setattr(module, "SCORED_TOKENS", 3)
    numbers = range(4 * module.SCORED_SAMPLES)  # four completions per prompt
    prompts = [[3 + number // 4] for number in numbers]
    completions = [[4 + number] * 5 for number in numbers]
    behavior = [[-float(number)] * 5 for number in numbers]
    samples = samples_of(prompts, completions, behavior)
    scored = list(scored_samples(trainer_of(tiny_model()), samples))
    assert [each.behavior_logps[0].tolist() for each in scored] == [
        [-float(number)] * 3 for number in numbers[::4]
    ]


def test_samples_of_a_filled_rollout_are_those_of_its_batch():
    generation = SimpleNamespace(samples=None, sync=SimpleNamespace(version="sync1"))
    listing = Listing.of([-1.0, -2.0], [4, 9], length=1)
    sample = Sample({}, [3], [4], "x", [-1.0], listing)
    rollout = Rollout(generation)
    rollout.filled = FilledBatch([sample], torch.ones(1, 1))
    rollout.end({}, RolloutCost())
    assert rollout.samples == Samples([[3]], [[4]], [listing], has_images=False)
