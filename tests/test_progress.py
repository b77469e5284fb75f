"""The line that a run prints per step, and the one during a long step."""

import math
import threading
from datetime import datetime
from types import SimpleNamespace

import pytest
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

ROW = {
    "loss": 0.01,
    "grad_norm": 0.4,
    "reward": 0.5123,
    "completions/clipped_ratio": 0.1172,
    "mismatch/kl_k3": 0.00123,
    "clip_ratio/region_mean": 0.0161,
    "epoch": 0.05,
}
PACE = "24.1 s/step  left 11:34:05"
UPDATE = {"loss": 0.0, "grad_norm": 0.1, "reward": None, "clip_ratio/region_mean": 0.0}


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (ROW, f"reward 0.512  KL 1e-03  clip 1.6%  cut 12%  {PACE}"),
        (UPDATE, f"clip 0.0%  {PACE}"),
        (UPDATE | {"grad_norm": math.nan}, f"grad_norm nan  clip 0.0%  {PACE}"),
        ({"critic/explained_variance": -0.001}, "critic 0.00"),
        ({"eval_sums/actor_avg@1": 0.4567, "epoch": 0}, "eval  sums/actor_avg@1 0.4567"),
        ({"train_runtime": 93784.0, "train_loss": 0.0}, "trained for 1 day, 2:03:04"),
        ({"my/number": 0.12345, "text": "x", "epoch": 1.0}, "my/number 0.12345"),
    ],
)
def test_a_line_shows_what_there_is(row, line):
    assert step_line(row, 12, 1740, 24.1).split("/1740  ") == [
        "12" if "train_runtime" in row else "  12",
        line,
    ]


def test_a_line_before_training():
    assert step_line({"eval_reward": 0.25}, 0, 0) == "before training  eval  reward 0.250"
    assert step_line(UPDATE, 1, 3) == "1/3  clip 0.0%"


def log(args, steps, start=0, first=True):
    """Begin a run, and end steps."""
    callback = StepLineCallback()
    control = TrainerControl()
    state = TrainerState(max_steps=start + 4, global_step=start, is_world_process_zero=first)
    callback.on_train_begin(args, state, control)
    for _ in range(steps):
        state.global_step += 1
        callback.on_log(args, state, control, logs=dict(ROW))


def test_only_the_first_process_prints(capsys):
    log(SimpleNamespace(), 2)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1/4", "2/4"]
    log(SimpleNamespace(), 2, first=False)
    assert capsys.readouterr().out == ""


def test_a_resumed_run_estimates_its_time_from_where_it_resumed(monkeypatch, capsys):
    clock = iter([100.0, 110.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    log(SimpleNamespace(), 2, start=500)
    first, second = capsys.readouterr().out.splitlines()
    # 10 s for the first of four steps, then 20 s: two took 30 s, and two are left.
    assert first.endswith("10 s/step  left 0:00:30")
    assert second.endswith("15 s/step  left 0:00:30")


def test_a_run_prints_its_pace_after_a_rollout(tmp_path, capsys):
    args = QuRLGRPOConfig(
        str(tmp_path),
        use_cpu=True,
        num_generations=8,
        max_completion_length=512,
        per_device_train_batch_size=16,
        steps_per_generation=8,
        gradient_accumulation_steps=4,
    )
    log(args, 2)
    steps = capsys.readouterr().out.splitlines()
    assert ["left" in line for line in steps] == [False, True]  # 8 / 4 = 2 updates per rollout


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


class Training:
    """A trainer in its fifth step of nine; with an engine, three answers are not complete."""

    def __init__(self, has_engine=True, is_first=True):
        self.state = TrainerState(max_steps=9, global_step=4)
        self.vllm_generation = SimpleNamespace()
        if has_engine:
            engine = SimpleNamespace(get_num_unfinished_requests=lambda: 3)
            self.vllm_generation.llm = SimpleNamespace(llm_engine=engine)
        self.is_world_process_zero = lambda: is_first


class TwoMinutes:
    """The event that ends the thread; its waits take no time."""

    def __init__(self, state, steps):
        self.waits = 0
        self.state = state
        self.steps = steps  # in each minute

    def wait(self, seconds):
        self.waits += 1
        self.state.global_step += self.steps
        return self.waits > 2

    def set(self):
        pass


@pytest.mark.parametrize(
    ("training", "steps", "line"),
    [
        (Training(), 0, "step 5/9: 3 answers are not complete yet\n"),
        (Training(has_engine=False), 0, "step 5/9\n"),
        (Training(is_first=False), 0, ""),
        (Training(), 1, ""),
    ],
)
def test_a_long_step_gets_a_dated_line(training, steps, line, monkeypatch, capsys):
    ended = TwoMinutes(training.state, steps)
    threads = SimpleNamespace(Event=lambda: ended, Thread=threading.Thread)
    monkeypatch.setattr(progress, "threading", threads)
    with live_line(training):
        pass
    printed = capsys.readouterr().out
    assert printed[21:] == line
    assert not line or datetime.fromisoformat(printed[:19])


def test_the_thread_ends_with_its_block():
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), live_line(Training()):
        assert threading.active_count() == before + 1
        raise KeyboardInterrupt
    assert threading.active_count() == before
