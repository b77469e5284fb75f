"""The line of a step: what it says, how wide it is, and who writes it where."""

import io
import itertools
import math
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest
from tqdm import tqdm
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from trl_qurl import QuRLGRPOConfig
from trl_qurl.lab import progress
from trl_qurl.lab.progress import StepLineCallback, step_line, use_step_lines

ROW = {
    "loss": 0.01,
    "grad_norm": 0.4,
    "reward": 0.5123,
    "completions/mean_length": 211.6,
    "mismatch/kl_k3": 0.00123,
    "clip_ratio/region_mean": 0.0161,
    "throughput/generated_tokens_per_s": 1234.4,
    "epoch": 0.05,
}
WHOLE = "  12/1740  reward 0.512  24.1 s/step  left 11:34:05  KL 1.2e-03  clip 1.6%  length 212  1234 tok/s"


def test_the_line_of_a_step():
    assert step_line(ROW, 12, 1740, 24.1) == WHOLE
    assert len(WHOLE) <= progress.WIDTH


@pytest.mark.parametrize("width", range(40, 101, 5))
@pytest.mark.parametrize("kind", ["step", "critic", "end", "own", "eval", "task"])
def test_no_line_is_too_wide(kind, width):
    rows = {
        "step": ROW | {"completions/mean_length": 16384.0, "throughput/generated_tokens_per_s": 123456.0},
        "critic": ROW | {"critic/explained_variance": -0.12},
        "end": {"train_runtime": 1e6, "train_loss": 0.0},
        "own": {f"mine/number_{i}": i / 3 for i in range(20)},
        "eval": {f"eval_{name}": value for name, value in ROW.items()} | {"eval_runtime": 1234.5},
        "task": {f"eval_{'long' * 9}/actor_avg@1": 0.5, f"eval_{'long' * 9}/actor_tokens": 1000.0},
    }
    line = step_line(rows[kind], 99999, 100000, 1234.5, width)
    assert 0 < len(line) <= width and "\n" not in line and " 99999/100000" in line


def test_a_narrow_terminal_keeps_what_matters_most():
    line = step_line(ROW, 12, 1740, 24.1, width=70)
    assert len(line) <= 70
    assert "reward 0.512" in line and "left" in line and "KL" in line and "tok/s" not in line


def test_metrics_that_are_missing_are_left_out():
    row = {"loss": 0.0, "grad_norm": 0.1, "reward": None, "clip_ratio/region_mean": 0.0, "epoch": 0.1}
    assert step_line(row, 2, 3, 0.05) == "2/3  0.05 s/step  left 0.05 s  clip 0.0%"
    assert step_line(row, 2, 3, None) == "2/3  clip 0.0%"
    assert (
        step_line(row | {"expected_accuracy": 0.47, "reward": 0.5}, 2, 3)
        == "2/3  accuracy 0.470  reward 0.500  clip 0.0%"
    )
    assert step_line(row, 3, 3, 0.05) == "3/3  0.05 s/step  clip 0.0%"


def test_a_metric_stays_in_its_column():
    """Rows without a rollout, longer and shorter numbers, the last step: the rest stays where it was."""
    columns = {}
    update = {"loss": 0.0, "clip_ratio/region_mean": 0.123}  # an update without its own rollout
    lines = [
        step_line(ROW, 8, 20, 9.5, 100, columns),
        step_line(update, 9, 20, 9.5, 100, columns),
        step_line(ROW | {"completions/mean_length": 96.0}, 20, 20, 11.5, 100, columns),
    ]
    assert lines == [
        " 8/20  reward 0.512  9.5 s/step  left 1:54  KL 1.2e-03  clip 1.6%  length 212  1234 tok/s",
        " 9/20                9.5 s/step  left 1:44              clip 12.3%",
        "20/20  reward 0.512  11.5 s/step             KL 1.2e-03  clip 1.6%   length 96   1234 tok/s",
    ]


def test_what_is_not_finite_is_shown_first():
    row = ROW | {"grad_norm": math.nan, "reward": math.nan}
    line = step_line(row, 2, 3, 1.0, width=60)
    assert line.startswith("2/3  grad_norm nan") and "reward nan" in line


def test_rows_that_are_no_steps():
    task = {"eval_gsm8k/actor_avg@1": 0.4567, "eval_gsm8k/actor_tokens": 180.4, "eval_gsm8k/actor_finished": 0.987}
    line = step_line(task | {"eval_gsm8k/seconds": 75.2, "epoch": 0}, 0, 20)
    assert line == " 0/20  gsm8k (actor)  45.7% correct  length 180  99% finished  1:15"
    evaluation = {"eval_loss": 0.0, "eval_reward": 0.25, "eval_completions/mean_length": 12.0, "eval_runtime": 3.25}
    assert step_line(evaluation, 4, 20) == " 4/20  eval  reward 0.250  length 12  3.25 s"
    assert step_line({"eval_loss": 0.5, "eval_runtime": 3.25}, 4, 20) == " 4/20  eval  loss 0.5  3.25 s"
    assert step_line({"train_runtime": 93784.0, "train_loss": 0.0}, 20, 20) == "20/20  trained in 1d 02h"
    assert step_line({"my/number": 0.12345, "text": "x", "epoch": 1.0}, 1, 20) == " 1/20  my/number 0.1235"


class Stream(io.StringIO):
    """A file, or a terminal."""

    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


def log_two_steps(terminal, first=True, disable_tqdm=False, start=0):
    """What comes to standard output and to standard error."""
    with redirect_stdout(Stream(terminal)) as out, redirect_stderr(Stream(terminal)) as err:
        train(StepLineCallback(), first, disable_tqdm, start)
    return out.getvalue(), err.getvalue()


def train(callback, first, disable_tqdm, start):
    args = SimpleNamespace(disable_tqdm=disable_tqdm)
    state = TrainerState(max_steps=start + 4, global_step=start, is_world_process_zero=first)
    control = TrainerControl()
    callback.on_train_begin(args, state, control)
    for _ in range(2):
        state.global_step += 1
        callback.on_step_end(args, state, control)
        callback.on_log(args, state, control, logs=dict(ROW))
    callback.on_log(args, state, control, logs={"train_runtime": 12.0})
    callback.on_train_end(args, state, control)


def test_a_file_gets_plain_lines():
    out, err = log_two_steps(terminal=False)
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["1/4", "2/4", "2/4"]
    assert "\r" not in out and err == ""
    assert all("s/step" in line and "left" in line for line in lines[:2]) and lines[2] == "2/4  trained in 12 s"


def test_a_terminal_gets_a_bar_and_the_lines_above_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "75")
    others = set(tqdm._instances)  # bars that another test's library has left open
    out, err = log_two_steps(terminal=True)
    lines = [line.split("\r")[-1] for line in out.splitlines() if "reward" in line]
    assert len(lines) == 2 and all(len(line) <= 75 and "left" in line for line in lines)
    assert "2/4 [" in err, "there is a bar"
    assert set(tqdm._instances) <= others, "and it is closed"


def test_disabled_bars_leave_the_lines():
    out, err = log_two_steps(terminal=True, disable_tqdm=True)
    assert len(out.splitlines()) == 3 and err == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_only_the_first_process_writes(terminal):
    assert log_two_steps(terminal, first=False) == ("", "")


def test_a_resumed_run_reckons_from_where_it_resumed(monkeypatch):
    clock = iter([100.0, 110.0, 130.0, 130.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    first, second, _ = log_two_steps(terminal=False, start=500)[0].splitlines()
    # 10 s for the first of four steps; then 20 s, so that two took 30 s and two are left.
    assert "10 s/step" in first and "left 30 s" in first
    assert "15 s/step" in second and "left 30 s" in second


def test_a_run_says_first_what_it_will_do_and_its_pace_after_a_whole_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_qurl.lab.progress.time", SimpleNamespace(monotonic=itertools.count(0, 25).__next__))
    settings = {"per_device_train_batch_size": 16, "steps_per_generation": 16, "gradient_accumulation_steps": 4}
    args = QuRLGRPOConfig(str(tmp_path), use_cpu=True, num_generations=8, max_completion_length=512, **settings)
    with redirect_stdout(Stream(False)) as out, redirect_stderr(Stream(False)):
        callback, state = StepLineCallback(), TrainerState(max_steps=870, is_world_process_zero=True)
        callback.on_train_begin(args, state, TrainerControl())
        for _ in range(4):
            state.global_step += 1
            callback.on_log(args, state, TrainerControl(), logs=dict(ROW))
    first, *steps = out.getvalue().splitlines()
    # 16 x 16 = 256 answers to 256 / 8 = 32 questions; 16 / 4 = 4 updates; 870 / 4 = 217.5, so 218 rollouts.
    expected = "870 steps: 218 INT8 rollouts of 32 questions x 8 answers, up to 512 tokens, 4 updates each (acr)"
    assert first == expected
    assert ["left" in line for line in steps] == [False, False, False, True], "the first step has a whole rollout"
    assert len({line.index("KL") for line in steps}) == 1


class Notebook(ProgressCallback):
    """Stands for the callback of notebooks, and for what somebody made of the usual one."""


@pytest.mark.parametrize(
    ("before", "after"),
    [(ProgressCallback, StepLineCallback), (PrinterCallback, StepLineCallback), (Notebook, Notebook)],
)
def test_it_takes_the_place_of_what_prints(before, after):
    handler = CallbackHandler([DefaultFlowCallback(), before()], None, None, None, None)
    trainer = SimpleNamespace(
        callback_handler=handler, add_callback=handler.add_callback, remove_callback=handler.remove_callback
    )
    use_step_lines(trainer)
    use_step_lines(trainer)
    assert [type(callback) for callback in handler.callbacks] == [DefaultFlowCallback, after]
