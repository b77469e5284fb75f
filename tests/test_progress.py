"""The line that a run prints per step, and the one during a long step."""

import re
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import yaml
from transformers import (
    DefaultFlowCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_callback import CallbackHandler

from trl_qurl import QuRLGRPOConfig
from trl_qurl.lab import progress
from trl_qurl.lab.progress import StepLineCallback, live_line, step_line, use_step_lines

# of two updates, one without a norm, a critic, an evaluation, the end, and a user's own
ROWS = yaml.safe_load("""
- loss: 0.01
  grad_norm: 0.4
  reward: 0.5123
  completions/clipped_ratio: 0.1172
  mismatch/kl_k3: 0.00123
  clip_ratio/region_mean: 0.0161
  epoch: 0.05
- {loss: 0.0, grad_norm: 0.1, reward: null, clip_ratio/region_mean: 0.0}
- {loss: 0.0, grad_norm: .nan, reward: null, clip_ratio/region_mean: 0.0}
- {critic/explained_variance: -0.001}
- {eval_sums/actor_avg@1: 0.4567, epoch: 0}
- {train_runtime: 93784.0, train_loss: 0.0}
- {my/number: 0.12345, text: x, epoch: 1.0}""")

LINES = """\
  12/1740  reward 0.512  KL 1e-03  clip 1.6%  cut 12%  24.1 s/step  left 11:34:05
  12/1740  clip 0.0%  24.1 s/step  left 11:34:05
  12/1740  grad_norm nan  clip 0.0%  24.1 s/step  left 11:34:05
  12/1740  critic 0.00
  12/1740  eval  sums/actor_avg@1 0.4567
12/1740  trained for 1 day, 2:03:04
  12/1740  my/number 0.12345"""


def test_a_line_shows_what_there_is():
    lines = [step_line(row, 12, 1740, 24.1) for row in ROWS]
    assert "\n".join(lines) == LINES
    assert step_line({"eval_reward": 0.25}, 0, 0) == "before training  eval  reward 0.250"


@pytest.fixture
def log(monkeypatch, capsys):
    """Begin a run, and end two steps, which take 10 and 20 s; the ends of the lines."""

    def log(args, start=0, first=True):
        clock = iter([100.0, 110.0, 130.0])
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        callback = StepLineCallback()
        control = TrainerControl()
        state = TrainerState(max_steps=start + 4, global_step=start, is_world_process_zero=first)
        callback.on_train_begin(args, state, control)
        for _ in range(2):
            state.global_step += 1
            callback.on_log(args, state, control, logs=dict(ROWS[0]))
        lines = capsys.readouterr().out.splitlines()
        return [line.replace("  reward 0.512  KL 1e-03  clip 1.6%  cut 12%", "") for line in lines]

    return log


def test_only_the_first_process_prints(log):
    assert not log(SimpleNamespace(), first=False)


def test_a_resumed_run_estimates_its_time_from_where_it_resumed(log):
    first = "501/504  10 s/step  left 0:00:30"
    assert log(SimpleNamespace(), start=500) == [first, "502/504  15 s/step  left 0:00:30"]


def test_a_run_prints_its_pace_after_a_rollout(log, tmp_path):
    """Of two updates."""
    args = QuRLGRPOConfig(
        str(tmp_path),
        use_cpu=True,
        num_generations=8,
        per_device_train_batch_size=16,
        steps_per_generation=8,
        gradient_accumulation_steps=4,
    )
    assert log(args) == ["1/4", "2/4  5 s/step  left 0:00:10"]


class Notebook(ProgressCallback):
    """A subclass, as for notebooks."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ProgressCallback, StepLineCallback),
        (PrinterCallback, StepLineCallback),
        (Notebook, Notebook),
    ],
)
def test_it_replaces_the_printer_of_transformers(before, after):
    handler = CallbackHandler([DefaultFlowCallback(), before()], None, None, None, None)
    trainer = SimpleNamespace(
        callback_handler=handler,
        add_callback=handler.add_callback,
        remove_callback=handler.remove_callback,
    )
    use_step_lines(trainer)
    use_step_lines(trainer)
    assert [type(callback) for callback in handler.callbacks] == [DefaultFlowCallback, after]


@pytest.fixture
def trainer():
    """In its fifth step of nine; with its engine, three answers are not complete."""
    trainer = MagicMock(state=TrainerState(max_steps=9, global_step=4))
    trainer.vllm_generation.llm.llm_engine.get_num_unfinished_requests.return_value = 3
    return trainer


@pytest.mark.parametrize(
    ("has_engine", "is_first", "steps", "line"),
    [
        (True, True, 0, "DATE  step 5/9: 3 answers are not complete yet\n"),
        (False, True, 0, "DATE  step 5/9\n"),
        (True, False, 0, ""),
        (True, True, 1, ""),
    ],
)
def test_a_long_step_gets_a_dated_line(
    has_engine, is_first, steps, line, trainer, monkeypatch, capsys
):
    trainer.is_world_process_zero.return_value = is_first
    if not has_engine:
        trainer.vllm_generation = object()
    minutes = iter([False, False, True])

    def wait(seconds):
        trainer.state.global_step += steps
        return next(minutes)

    ended = SimpleNamespace(wait=wait, set=lambda: None)
    threads = SimpleNamespace(Event=lambda: ended, Thread=threading.Thread)
    monkeypatch.setattr(progress, "threading", threads)
    with live_line(trainer):
        pass
    assert re.sub(r"^[\d-]{10} [\d:]{8}", "DATE", capsys.readouterr().out) == line


def test_the_thread_ends_with_its_block(trainer):
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), live_line(trainer):
        assert threading.active_count() == before + 1
        raise KeyboardInterrupt
    assert threading.active_count() == before
