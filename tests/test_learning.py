"""What is said of a run that learns nothing, or not what is meant."""

import math
import re
from types import SimpleNamespace

import pytest
from support.building import build
from transformers import TrainerState

from trl_qurl import QuRLGRPOTrainer, QuRLPPOTrainer
from trl_qurl.trainers.checks.learning import LearningWatch

ALIKE = {"reward": 0.0, "reward_std": 0.4, "frac_reward_zero_std": 1.0}
USEFUL = ALIKE | {"frac_reward_zero_std": 0.97}
ALL_CUT = {"completions/clipped_ratio": 1.0}
MOST_CUT = {"completions/clipped_ratio": 0.6}


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    init = "trl_qurl.rollout.backend.QuantizedVLLMGeneration._init_vllm"
    sync = SimpleNamespace(unchanged_steps=lambda: range(0))
    monkeypatch.setattr(init, lambda self: vars(self).update(context=64, sync=sync))


@pytest.fixture
def trainer(tmp_path):
    """A trainer with two updates per rollout."""
    return build(QuRLGRPOTrainer, tmp_path)


@pytest.fixture
def watch(trainer):
    return trainer.pop_callback(LearningWatch)


def roll_out(watch, *rows):
    for row in rows:
        watch.on_rollout(SimpleNamespace(metrics=row))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (MOST_CUT | {"reward": 1.0}, "earned the same reward, 1 on average, .* solves sometimes"),
        (MOST_CUT | {"reward": math.nan, "frac_reward_zero_std": 0.0}, "returned a finite number"),
        (MOST_CUT, "60% of the answers were cut off at max_completion_length=16"),
        ({}, r"no answer earned a reward.*log_completions=True"),
        (ALL_CUT | {"frac_reward_zero_std": 0.0}, "100% of the answers were cut off"),
    ],
)
def test_the_cause_is_named(row, reason, watch, trainer, monkeypatch, caplog):
    # with it, what is cut off teaches nothing
    monkeypatch.setattr(trainer.args, "mask_truncated_completions", True)
    roll_out(watch, *[ALIKE | row] * 2)
    assert caplog.messages == []
    roll_out(watch, *[ALIKE | row] * 4)
    [text] = caplog.messages
    assert re.search(f"3 rollouts in a row: .*{reason}", text)
    watch.on_train_end()
    assert re.search(f"learned nothing: .*{reason}", caplog.messages[1])


def log_rows(watch, trainer, norms, **row):
    """Log updates of rollouts with a signal, one a rollout."""
    for step, norm in enumerate(norms, 1):
        roll_out(watch, USEFUL | row)
        state = TrainerState(global_step=step)
        watch.on_log(trainer.args, state, None, logs={"grad_norm": norm, "learning_rate": 1e-6})


def test_updates_without_a_gradient_are_told_of_once(watch, trainer, caplog):
    log_rows(watch, trainer, [0.0] * 5 + [0.1, 0.0, 0.0])
    assert caplog.messages == []
    log_rows(watch, trainer, [0.0] * 18)
    [text] = caplog.messages
    assert "grad_norm was 0 in 6 logged updates" in text


def test_a_critics_warmup_is_meant(watch, trainer, monkeypatch, caplog):
    monkeypatch.setattr(trainer.args, "critic_warmup_steps", 20, raising=False)
    log_rows(watch, trainer, [0.0] * 20)
    assert caplog.messages == []


def test_an_infinite_reward_is_named_with_its_function_once(watch, trainer, caplog):
    infinite = {"rewards/reward/mean": -math.inf}
    log_rows(watch, trainer, [0.1] * 4, **infinite)  # with a weight of 0
    assert caplog.messages == []
    log_rows(watch, trainer, [0.0] * 40, reward=-math.inf, **infinite)
    [text] = caplog.messages
    assert "The reward function 'reward' returned inf or -inf" in text


def test_a_run_that_learns_is_not_warned_of(watch, caplog):
    roll_out(watch, *[ALIKE, ALIKE, USEFUL] * 2, ALIKE)
    watch.on_train_end()
    assert caplog.messages == []


def test_a_critic_also_learns_from_rewards_that_differ_between_questions(
    watch, trainer, monkeypatch, caplog
):
    monkeypatch.setattr(trainer, "_learns_within_groups", QuRLPPOTrainer._learns_within_groups)
    roll_out(watch, *[ALIKE] * 4)
    assert caplog.messages == []
    roll_out(watch, *[ALIKE | {"reward_std": 0.0}] * 4)
    assert len(caplog.messages) == 1
