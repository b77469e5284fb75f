"""Assertions about the records of training runs (`tests/scenarios/train.py`)."""

import pytest
from conftest import SATURATES

# An engine that started from the same checkpoint runs the same kernels on the same bytes, so its
# figures are the same to the last bit. The slack is for machines where the thread count changes the
# order of sums.
SAME = 1e-4
MOVED = 1e-2

ADAPTER = {"weight_sync": "adapter", "sync_check_interval": 1}

NOT_RESTORED = ("time/", "step_time", "throughput/", "weights/")
"""Metrics that a resumed run does not repeat: properties of the machine, or changes since an earlier
sync of the same process."""


def rollout_rows(record):
    """The logged rows of rollouts with their mismatch, of which there is at least one."""
    rows = [row for row in record["history"] if "mismatch/kl_k3" in row]
    assert rows, "no rollout was measured"
    return rows


def metrics_by_step(record):
    """Metrics that a resumed run has to repeat, by step."""
    return {
        row["step"]: {
            name: value for name, value in row.items() if not name.startswith(NOT_RESTORED)
        }
        for row in record["history"]
        if "loss" in row
    }


def assert_moved(record, is_lora=False):
    """Training changed what the engine computes; UAQ scaled the
    policy, but not below an adapter.
    """
    assert record["probe_end"] != pytest.approx(record["probe_start"], abs=MOVED), (
        "training did not reach the engine"
    )
    assert record["adapter_untouched"]
    assert record["uaq_scale"] == (1.0 if is_lora else 1.5)


def assert_synced(record, fresh, lora=False, tolerance=SAME):
    """The engine computes what a fresh one does with the same weights."""
    assert record["probe_end"] == pytest.approx(fresh, abs=tolerance)
    assert_moved(record, lora)


def assert_sends_everything(record):
    """Every sync sent as many bytes as the first."""
    assert {row["sync/sent_mb"] for row in rollout_rows(record)} == {record["whole_mb"]}


def assert_metrics(history, scheme):
    """The mismatch of each rollout is that of the format, and its times were measured."""
    # 8-bit rollouts of this model differ by about 1e-5 nats, unquantized ones by 1e-6; a wrong
    # weight by 1e-3. With four bits, or sums that saturate, rounding is as large as that: the
    # probe and the fresh engine decide.
    kl = 2e-4
    ratio = 1.5
    ess = 0.99
    if scheme == "w4a16" or SATURATES:
        kl = 2e-2
        ratio = 3
        ess = 0.9
    for row in rollout_rows({"history": history}):
        assert 0 <= row["mismatch/kl_k3"] < kl
        assert row["mismatch/ratio_max"] < ratio
        assert ess < row["mismatch/ess"] <= 1
        assert row["time/sync_s"] > 0
        assert row["step_time"] > row["time/generate_s"] > 0
        assert row["step_time"] > row.get("time/sync_check_s", 0)
        assert row["throughput/generated_tokens_per_s"] > 0
