"""The line that a run prints per step, and its warnings."""

import io
import itertools
import math
import re
import threading
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from functools import partial
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
from trl.experimental.gmpo import GMPOConfig

from trl_qurl import QuRLGRPOConfig
from trl_qurl.config import QuantizedRolloutsConfig
from trl_qurl.lab import live, progress
from trl_qurl.lab.live import live_line, step_line
from trl_qurl.lab.progress import StepLineCallback, use_step_lines

ROW = {
    "loss": 0.01,
    "grad_norm": 0.4,
    "reward": 0.5123,
    "completions/mean_length": 211.6,
    "completions/clipped_ratio": 0.1172,
    "mismatch/kl_k3": 0.00123,
    "clip_ratio/region_mean": 0.0161,
    "throughput/generated_tokens_per_s": 1234.4,
    "epoch": 0.05,
}
UPDATE = {"loss": 0.0, "clip_ratio/region_mean": 0.125}
WHOLE = (
    "  12/1740  reward 0.512  KL 1.2e-03  clip 1.6%  length 212  cut 12%  1234 tok/s  24.1 s/step  "
    "left 11:34:05"
)


def test_the_line_of_a_step_shows_the_metrics_that_there_are():
    assert step_line(ROW, 12, 1740, 24.1) == WHOLE
    row = {
        "loss": 0.0,
        "grad_norm": 0.1,
        "reward": None,
        "clip_ratio/region_mean": 0.0,
        "epoch": 0.1,
    }
    assert step_line(row, 2, 3, 5) == "2/3  clip 0.0%  5 s/step  left 0:00:05"
    assert step_line(row, 2, 3, None) == "2/3  clip 0.0%"
    row |= {"expected_accuracy": 0.47, "reward": 0.5, "critic/explained_variance": -0.001}
    assert step_line(row, 2, 3) == "2/3  accuracy 0.470  reward 0.500  critic 0.00  clip 0.0%"
    row = ROW | {"grad_norm": math.nan, "reward": math.nan}
    assert step_line(row, 2, 3, 1.0).startswith("2/3  grad_norm nan  reward nan  KL")


def test_lines_of_evaluations_and_of_the_end():
    task = {"eval_gsm8k/actor_avg@1": 0.4567, "eval_gsm8k/actor_tokens": 180.4, "epoch": 0}
    assert (
        step_line(task, 0, 20, 9.0)
        == " 0/20  eval  gsm8k/actor_avg@1 0.4567  gsm8k/actor_tokens 180.4"
    )
    evaluation = {
        "eval_loss": 0.0,
        "eval_reward": 0.25,
        "eval_completions/mean_length": 12.0,
        "eval_runtime": 3.25,
    }
    assert step_line(evaluation, 0, 0) == "before training  eval  reward 0.250  length 12"
    assert step_line(evaluation, 4, 20, 9.0) == " 4/20  eval  reward 0.250  length 12"
    summary = {"train_runtime": 93784.0, "total_flos": 0, "train_loss": 0.0}
    assert step_line(summary, 20, 20, 9.0) == "20/20  trained for 1 day, 2:03:04"
    # not RL
    assert (
        step_line({"loss": 0.5, "learning_rate": 0.01}, 4, 20)
        == " 4/20  loss 0.5  learning_rate 0.01"
    )
    assert (
        step_line({"my/number": 0.12345, "text": "x", "epoch": 1.0}, 1, 20)
        == " 1/20  my/number 0.12345"
    )


def test_columns_stay_in_their_place_between_rollouts():
    evaluation, widths = {"eval_reward": 0.25, "eval_completions/mean_length": 12.0}, {}
    lines = [step_line(row, 8, 12, 5.0, widths) for row in (UPDATE, ROW, UPDATE, evaluation, ROW)]
    rollout = (
        " 8/12  reward 0.512  KL 1.2e-03  clip 1.6%   length 212  cut 12%  1234 tok/s  5 s/step  "
        "left 0:00:20"
    )
    assert lines[0] == " 8/12  clip 12.5%  5 s/step  left 0:00:20"
    assert lines[1] == lines[4] == rollout
    assert all(lines[2].index(name) == rollout.index(name) for name in ("clip", "5 s/step"))
    assert lines[3] == " 8/12  eval  reward 0.250  length 12", (
        "evaluations have columns of their own"
    )


def log_two_steps(first=True, start=0):
    """Return the standard output."""
    callback, args, control = StepLineCallback(), SimpleNamespace(), TrainerControl()
    state = TrainerState(max_steps=start + 4, global_step=start, is_world_process_zero=first)
    with redirect_stdout(io.StringIO()) as out:
        callback.on_train_begin(args, state, control)
        for _ in range(2):
            state.global_step += 1
            callback.on_log(args, state, control, logs=dict(ROW))
        callback.on_log(args, state, control, logs={"train_runtime": 12.0})
    return out.getvalue()


def test_only_the_first_process_prints():
    assert [line.split()[0] for line in log_two_steps().splitlines()] == ["1/4", "2/4", "2/4"]
    assert log_two_steps(first=False) == ""


def test_a_resumed_run_estimates_its_time_from_where_it_resumed(monkeypatch):
    clock = iter([100.0, 110.0, 130.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    first, second, _ = log_two_steps(start=500).splitlines()
    # 10 s for the first of four steps, then 20 s: two took 30 s, and two are left.
    assert "10 s/step  left 0:00:30" in first
    assert "15 s/step  left 0:00:30" in second


def test_a_run_first_prints_its_plan_and_later_its_pace(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "trl_qurl.lab.progress.time", SimpleNamespace(monotonic=itertools.count(0, 25).__next__)
    )
    settings = {
        "per_device_train_batch_size": 16,
        "steps_per_generation": 16,
        "gradient_accumulation_steps": 4,
    }
    args = QuRLGRPOConfig(
        str(tmp_path), use_cpu=True, num_generations=8, max_completion_length=512, **settings
    )
    with redirect_stdout(io.StringIO()) as out:
        callback, state = (
            StepLineCallback(),
            TrainerState(max_steps=870, is_world_process_zero=True),
        )
        callback.on_train_begin(args, state, TrainerControl())
        for row in (ROW, UPDATE, UPDATE, ROW):
            state.global_step += 1
            callback.on_log(args, state, TrainerControl(), logs=dict(row))
    first, *steps = out.getvalue().splitlines()
    # 16 x 16 = 256 answers to 256 / 8 = 32 questions; 16 / 4 = 4 updates; 870 / 4 = 217.5, so 218
    # rollouts.
    expected = "rollouts of 256 answers (32 questions x 8), up to 512 tokens, 4 updates each (acr)"
    assert first == f"870 steps: 218 INT8 {expected}"
    args.warmup_steps = 2
    assert re.fullmatch(
        r"4 steps: 1 INT8 rollout of .*; the learning rate rises for 2 steps",
        progress._plan(args, 4),
    )
    assert {line.index("clip") for line in steps} == {steps[0].index("clip")}
    assert ["left" in line for line in steps] == [False, False, False, True], (
        "the first step has a whole rollout"
    )


@dataclass
class QuantizedGMPOConfig(QuantizedRolloutsConfig, GMPOConfig):
    """As in docs/architecture.md: it has no objective of ours."""


def test_a_trainer_of_trl_on_our_rollouts_starts_without_a_plan(tmp_path, capsys):
    args = QuantizedGMPOConfig(str(tmp_path), use_cpu=True)
    state = TrainerState(max_steps=4, is_world_process_zero=True)
    callback = StepLineCallback()
    callback.on_train_begin(args, state, TrainerControl())
    state.global_step = 1
    callback.on_log(args, state, TrainerControl(), logs=dict(UPDATE))
    assert capsys.readouterr().out.startswith("1/4  clip 12.5%")


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


def watch_engine(answers, seconds, monkeypatch, is_first=True):
    """Run the thread's loop while `answers(second)` are the tokens so far, by request."""
    now, generation = 0, SimpleNamespace()

    def wait(step):
        nonlocal now
        now += step
        state.global_step += now == 130
        counts = {
            n: SimpleNamespace(num_output_tokens=partial(sum, [tokens]))
            for n, tokens in answers(now).items()
        }
        states = {n: SimpleNamespace(detokenizer=count) for n, count in counts.items()}
        engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
        if answers is not no_engine:
            generation.llm = SimpleNamespace(llm_engine=engine)
        return now > seconds

    state = TrainerState(
        max_steps=9, global_step=4, log_history=[{"time/generate_s": 58.4}, {"loss": 0.0}]
    )
    args, first = SimpleNamespace(max_completion_length=100), lambda: is_first
    trainer = SimpleNamespace(
        state=state, args=args, vllm_generation=generation, is_world_process_zero=first
    )
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: now))
    live._report(trainer, SimpleNamespace(wait=wait))


def no_engine(second):
    """A server generates."""
    return {}


def four_answers(second):
    """A token a second each; the first answer ends after 29 seconds, the others after 100."""
    return {
        name: second
        for name, end in {"a": 29, "b": 100, "c": 100, "d": 100}.items()
        if second <= end
    }


def test_a_log_gets_a_dated_line_a_minute(monkeypatch, capsys):
    watch_engine(four_answers, 165, monkeypatch)
    rollout, update = capsys.readouterr().out.splitlines()
    # The rollout is seen in second 1. In second 61 there are 3 x 61 + 29 = 212 tokens, 3.53 a
    # second, and 3 x 39 may follow in 33 seconds. It is over in second 101, and a minute later the
    # next step takes half of one.
    assert rollout[21:] == "generating: 1 of 4 answers, 212 tokens, 4 tok/s, at most 0:00:33 left"
    assert datetime.fromisoformat(rollout[:19])
    assert update[21:] == "step 6/9: 0:00:31 so far, generating took 58 s last time"


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    watch_engine(four_answers, 25, monkeypatch)
    text = capsys.readouterr().out
    assert "\n" not in text and text.count("\r") == 2 and text.endswith("\r")
    assert text.startswith(
        "\x1b[K\x1b[?7lgenerating: 0 of 4 answers, 44 tokens, 4 tok/s, at most 0:01:"
    )


def test_a_server_shows_the_time(monkeypatch, capsys):
    watch_engine(no_engine, 65, monkeypatch)
    line = "step 5/9: 0:01:00 so far, generating took 58 s last time\n"
    assert capsys.readouterr().out[21:] == line
    watch_engine(four_answers, 65, monkeypatch, is_first=False)
    watch_engine(lambda second: {"a": "no number"}, 65, monkeypatch)  # the engine changed meanwhile
    assert capsys.readouterr().out == ""


def test_the_thread_ends_with_its_block():
    trainer, before = TrainerState(), threading.active_count()
    trainer.state = trainer
    trainer.is_world_process_zero = True.__bool__
    with pytest.raises(KeyboardInterrupt), live_line(trainer):
        assert threading.active_count() == before + 1
        raise KeyboardInterrupt
    assert threading.active_count() == before
