"""Mismatch and weight-change metrics, by hand."""

import math

import pytest
import torch
from accelerate import Accelerator

from trl_qurl.quantization import SCHEMES
from trl_qurl.rollout.mismatch import MismatchTally, mismatch_metrics, mismatch_sums
from trl_qurl.rollout.weight_change import WeightChangeTracker
from trl_qurl.trainers.loss_metrics import loss_metrics

INT8 = SCHEMES["int8"]


def test_mismatch_by_hand():
    # Two learned tokens with ρ = 4 and ρ = 1/2; the third is padding, the fourth was not scored by the engine.
    proximal = torch.tensor([[math.log(4.0), math.log(0.5), 50.0, 1.0]])
    behavior = torch.tensor([[0.0, 0.0, 0.0, math.nan]])
    mask = torch.tensor([[1, 1, 0, 1]])
    metrics = mismatch_metrics(*mismatch_sums(proximal, behavior, mask, cap=2.0))
    assert metrics["mismatch/kl_k1"] == pytest.approx(-math.log(2) / 2)  # -(ln 4 + ln 1/2) / 2
    # k3: (4 - 1 - ln 4 + 1/2 - 1 - ln 1/2) / 2 = (2.5 - ln 2) / 2
    assert metrics["mismatch/kl_k3"] == pytest.approx((2.5 - math.log(2)) / 2)
    assert metrics["mismatch/ratio_mean"] == pytest.approx(2.25)
    assert metrics["mismatch/ratio_max"] == pytest.approx(4.0)
    assert metrics["mismatch/capped_share"] == 0.5
    assert metrics["mismatch/invalid_share"] == pytest.approx(1 / 3)
    assert metrics["mismatch/ess"] == pytest.approx(4.5**2 / (2 * 16.25))  # (Σρ)² / (n Σρ²)


@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-6])
def test_a_small_kl_keeps_its_digits(size):
    """ρ − 1 − log ρ is x²/2 + x³/6 for x = log ρ; float32 knows ρ itself to 6e-8 only, which x² is far below."""
    behavior = torch.full((8, 512), -0.125)
    proximal = behavior + size * torch.linspace(-1, 1, 8 * 512).view(8, 512)
    everywhere = torch.ones(8, 512, dtype=torch.bool)
    log_ratios = (proximal.double() - behavior.double()).flatten().tolist()
    expected = sum(x * x / 2 + x**3 / 6 for x in log_ratios) / len(log_ratios)
    tally = MismatchTally(Accelerator(cpu=True))
    tally.add(proximal, behavior, everywhere, cap=2.0)
    assert tally.pop()["mismatch/kl_k3"] == pytest.approx(expected, rel=1e-4)
    stale = loss_metrics(proximal, behavior, {}, everywhere, 0.2, lambda sums: sums)
    assert stale["policy/approx_kl"] == pytest.approx(expected, rel=1e-4)


def test_a_log_probability_without_bounds_leaves_numbers():
    behavior = torch.tensor([[-0.5, -5000.0]])  # below vLLM's stand-in for -inf, and no number of a sampled token
    tally = MismatchTally(Accelerator(cpu=True))
    tally.add(torch.full((1, 2), -0.5), behavior, torch.ones(1, 2, dtype=torch.bool), cap=2.0)
    assert all(math.isfinite(value) for value in tally.pop().values())


def test_mismatch_adds_up_over_processes():
    torch.manual_seed(0)
    proximal, behavior = torch.randn(4, 5), torch.randn(4, 5)
    mask = torch.rand(4, 5) < 0.7
    whole, whole_max = mismatch_sums(proximal, behavior, mask, 2.0)
    parts = [mismatch_sums(proximal[i : i + 2], behavior[i : i + 2], mask[i : i + 2], 2.0) for i in (0, 2)]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
    assert max(part[1] for part in parts) == whole_max


def test_no_scored_token_gives_no_metrics():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert mismatch_metrics(*mismatch_sums(torch.zeros(1, 2), torch.zeros(1, 2), nothing, 2.0)) == {}


def sync(tracker, weight):
    tracker.begin_sync()
    tracker.observe("layer", weight, INT8.quantize(weight))
    return tracker.end_sync()


def test_weight_change_by_hand():
    tracker = WeightChangeTracker(every=1, scheme=INT8)
    # Scale 1.275 / 127.5 = 0.01: codes 127 (127.5 is clipped) and 50. Q(θ) = (1.27, 0.5), θ = (1.275, 0.504):
    # error (0.005, 0.004), squared 4.1e-5; ‖θ‖² = 1.625625 + 0.254016.
    first = sync(tracker, torch.tensor([[1.275, 0.504]]))
    assert first.keys() == {"weights/normalized_quantization_error"}
    assert first["weights/normalized_quantization_error"] == pytest.approx(4.1e-5 / 1.879641, rel=1e-3)
    # The second weight moves by 0.02: two codes, so one code of two has changed. ‖Δθ‖² = 4e-4.
    second = sync(tracker, torch.tensor([[1.275, 0.524]]))
    assert second["weights/codes_changed_share"] == 0.5
    assert second["weights/normalized_update"] == pytest.approx(4e-4 / 1.879641, rel=1e-3)


def test_an_update_below_the_rounding_changes_no_code():
    tracker = WeightChangeTracker(every=1, scheme=INT8)
    sync(tracker, torch.tensor([[1.275, 0.504]]))
    metrics = sync(tracker, torch.tensor([[1.275, 0.5041]]))
    assert metrics["weights/codes_changed_share"] == 0
    assert 0 < metrics["weights/normalized_update"] < metrics["weights/normalized_quantization_error"]


def test_measured_every_n_rollouts_over_n_rollouts():
    tracker = WeightChangeTracker(every=3, scheme=INT8)
    weights = [torch.tensor([[1.275, 0.5 + 0.02 * step]]) for step in range(7)]
    measured = {step: metrics for step, weight in enumerate(weights) if (metrics := sync(tracker, weight))}
    assert list(measured) == [0, 3, 6]
    # Three steps of 0.02 lie between measurements.
    norm = 1.275**2 + 0.5**2
    assert measured[3]["weights/normalized_update"] == pytest.approx(0.06**2 / norm, rel=1e-3)
    assert measured[3]["weights/codes_changed_share"] == 0.5


def test_the_weights_are_kept_by_value_and_in_host_memory():
    tracker = WeightChangeTracker(every=1, scheme=INT8)
    weight = torch.tensor([[1.0, 0.5]])
    sync(tracker, weight)
    weight.add_(0.1)  # an optimizer updates in place
    assert sync(tracker, weight)["weights/normalized_update"] > 0


def test_a_weight_that_does_not_move_has_no_update():
    tracker = WeightChangeTracker(every=1)
    weight = torch.randn(1024, 512)
    for _ in range(3):
        tracker.begin_sync()
        tracker.observe("layer", weight, {})
        found = tracker.end_sync()
    assert found == {"weights/normalized_update": 0.0}


def test_zero_measures_nothing():
    tracker = WeightChangeTracker(every=0, scheme=INT8)
    assert [sync(tracker, torch.ones(1, 2)) for _ in range(3)] == [{}] * 3


def test_unquantized_rollouts_measure_the_update_alone():
    tracker = WeightChangeTracker(every=1)
    for weight in (torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.1]])):
        tracker.begin_sync()
        tracker.observe("layer", weight, {})
        metrics = tracker.end_sync()
    assert metrics == {"weights/normalized_update": pytest.approx(0.01)}
