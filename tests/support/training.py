"""Settings of training scenarios, and assertions about their records."""

import pytest
from conftest import SATURATES

# An engine that started from the same checkpoint runs the same kernels on the same bytes: its figures are the same to
# the last bit. The slack is for machines whose thread count changes the order of sums.
SAME = 1e-4
MOVED = 1e-2

ADAPTER = {"weight_sync": "adapter", "sync_check_interval": 1}

STEPS = 12
INSIDE_A_ROLLOUT, BETWEEN_ROLLOUTS = 2, 4
CONFIG = {"steps_per_generation": 4, "max_steps": STEPS, "save_strategy": "steps", "save_steps": 2}
CONFIG |= {"smooth_activations": None}  # the default, whose scales a checkpoint has to keep

# Seconds are not a property of the policy.
NOT_RESTORED = ("time/", "step_time", "throughput/")


def assert_synced(record, fresh, lora=False, tolerance=SAME):
    assert record["probe_end"] == pytest.approx(fresh, abs=tolerance)
    moved = max(abs(end - start) for end, start in zip(record["probe_end"], record["probe_start"], strict=True))
    assert moved > MOVED, "training did not move the probe: the comparison shows nothing"
    assert record["adapter_untouched"]
    assert record["uaq_scale"] == (1.0 if lora else 1.5)


def assert_metrics(history, scheme):
    rollouts = [row for row in history if "mismatch/kl_k3" in row]
    assert rollouts
    is_coarse = scheme == "w4a16" or SATURATES
    for row in rollouts:
        # 8-bit rollouts of this model differ by about 1e-5 nats, unquantized ones by 1e-6; a wrong weight by 1e-3.
        # With four bits, or sums that saturate, rounding is as large as that: the probe and the fresh engine decide.
        assert 0 <= row["mismatch/kl_k3"] < (2e-2 if is_coarse else 2e-4)
        assert row["mismatch/ratio_max"] < (3 if is_coarse else 1.5)
        assert (0.9 if is_coarse else 0.99) < row["mismatch/ess"] <= 1
        assert row["time/sync_s"] > 0
        assert row["time/generate_s"] > 0
        assert row["throughput/generated_tokens_per_s"] > 0


def metrics_by_step(record):
    return {
        row["step"]: {name: value for name, value in row.items() if not name.startswith(NOT_RESTORED)}
        for row in record["history"]
        if "loss" in row
    }
