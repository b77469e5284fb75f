"""The log of a run survives a kill, continues when the run resumes, and is never overwritten by
another run.
"""

import gzip
import os
import signal
import subprocess
from dataclasses import fields
from types import SimpleNamespace

import pytest
from accelerate import PartialState
from transformers import TrainerState, TrainingArguments
from trl import GRPOConfig

from trl_qurl import QuRLGRPOConfig
from trl_qurl.lab.runs import read_run
from trl_qurl.trainers.callbacks import RunLogCallback
from trl_qurl.trainers.run_log import RUN_LOG, append_row, begin_log, check_unused, end_log

NOT_LOGGED = {"rollout_checkpoint_dir", "vllm_engine_kwargs", "dynamic_sampling_reward"}
"""Our settings that hold any text."""

FOUR = [{"step": step, "reward": step / 10} for step in (1, 2, 3, 4)]


def write(path, rows, settings=None, history=()):
    begin_log(path, settings or {"learning_rate": 1e-5}, history)
    for row in rows:
        append_row(path, row)
    end_log(path)


def test_rows_and_settings_are_read_as_written(tmp_path):
    with pytest.raises(FileNotFoundError, match="output_dir of a run"):
        read_run(tmp_path)
    rows = [{"step": 1, "reward": 0.5}, {"step": 4, "reward": float("nan")}]
    write(tmp_path / RUN_LOG, rows, {"seed": 3, "lr": float("inf")})
    run = read_run(tmp_path)
    assert run.settings == {"seed": 3, "lr": None}
    assert run.rows == [rows[0], {"step": 4, "reward": None}]
    assert run.series("reward") == [(1, 0.5)]
    packed = tmp_path / f"{RUN_LOG}.gz"
    packed.write_bytes(gzip.compress((tmp_path / RUN_LOG).read_bytes()))
    assert read_run(packed).rows == run.rows
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"{packed} is not a run log, or is damaged"):
        read_run(packed)
    with open(tmp_path / RUN_LOG, "a") as file:
        file.write('{"step": 5, "rew')  # a kill cuts off the last line
    assert read_run(tmp_path).rows == run.rows


SECRETS = {
    "hub_token": "s3cr3t",
    "run_name": "https://user:s3cr3t@host",
    "vllm_engine_kwargs": {"hf_token": "s3cr3t"},
}
"""Settings in which people have them: by a name, by a form, or by neither."""


def test_no_text_is_logged_but_that_of_settings_on_a_list(tmp_path):
    kept = {"rollout_quantization": {"re:.*": "int8"}, "objective": "tis", "beta": None}
    rows = [{"step": 1, "note": "s3cr3t"}]
    write(tmp_path / RUN_LOG, rows, kept | SECRETS, rows)
    assert read_run(tmp_path / RUN_LOG).settings == kept
    assert "s3cr3t" not in (tmp_path / RUN_LOG).read_text()


def test_every_setting_of_ours_is_logged(tmp_path):
    config = QuRLGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, dynamic_sampling=True)
    settings = config.to_dict()
    ours = settings.keys() - {field.name for field in fields(GRPOConfig)}
    settings |= dict.fromkeys(NOT_LOGGED, "s3cr3t")
    write(tmp_path / RUN_LOG, [], settings)
    assert ours - read_run(tmp_path).settings.keys() == NOT_LOGGED


RUNS_UNTIL_KILLED = """
import os, signal, sys
from pathlib import Path
from trl_qurl.trainers.run_log import begin_log
begin_log(Path(sys.argv[1]), {"seed": 1})
print(os.getpid(), flush=True)
signal.pause()
"""


def test_two_runs_do_not_share_a_directory(warm_python, tmp_path):
    path = tmp_path / RUN_LOG
    command = [warm_python, "-c", RUNS_UNTIL_KILLED, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        trainer = int(run.stdout.readline())
        said = f"Another run .* {tmp_path}, .*another output_dir"
        with pytest.raises(RuntimeError, match=said):
            check_unused(tmp_path)
        with pytest.raises(RuntimeError, match=said):
            begin_log(path, {"seed": 2})
        assert read_run(path).settings == {"seed": 1}
        os.kill(trainer, signal.SIGKILL)
        run.wait()
    check_unused(tmp_path)
    check_unused(tmp_path / "missing")


def test_a_new_run_renames_the_old_log(tmp_path):
    for reward in (0.1, 0.2, 0.3):
        write(tmp_path / RUN_LOG, [{"step": 1, "reward": reward}])
    assert read_run(tmp_path / "run-1.jsonl").series("reward") == [(1, 0.1)]
    assert read_run(tmp_path / "run-2.jsonl").series("reward") == [(1, 0.2)]
    assert read_run(tmp_path / RUN_LOG).series("reward") == [(1, 0.3)]


DAMAGED = b"""\
\0\0\xff
{"step": 2, "rew
[1]
{"reward": 1}
{"step": "2"}"""


@pytest.mark.parametrize("damage", DAMAGED.split(b"\n"))
def test_a_damaged_line_is_refused_and_does_not_stop_a_resume(damage, tmp_path):
    path = tmp_path / RUN_LOG
    write(path, FOUR)
    lines = path.read_bytes().split(b"\n")
    lines[2] = damage
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match="is damaged"):
        read_run(path)
    write(path, [{"step": 4, "reward": 0.7}], {"seed": 2}, FOUR[2:3])
    run = read_run(path)
    assert run.series("reward") == [(3, 0.3), (4, 0.7)]
    assert run.settings == {"seed": 2}


@pytest.mark.parametrize("first", [True, False])
def test_one_process_writes(first, tmp_path, monkeypatch):
    monkeypatch.setattr(PartialState, "is_main_process", first)
    args = TrainingArguments(str(tmp_path), learning_rate=3e-5, use_cpu=True)
    state = TrainerState(is_world_process_zero=first, global_step=2)
    model = SimpleNamespace(config=SimpleNamespace(_name_or_path="some/model"))
    callback = RunLogCallback({"algorithm": "GRPO"})
    callback.on_log(args, state, None, logs={"eval_reward": 1.0})
    assert not (tmp_path / RUN_LOG).exists(), "evaluating without training leaves no log"
    callback.on_train_begin(args, state, None, model=model)
    callback.on_log(args, state, None, logs={"reward": 0.5})
    callback.close()
    assert (tmp_path / RUN_LOG).exists() is first
    check_unused(tmp_path)
    if first:
        run = read_run(tmp_path)
        assert run.rows == [{"step": 2, "reward": 0.5}]
        kept = {"learning_rate": 3e-5, "algorithm": "GRPO", "model": "some/model"}
        assert kept.items() <= run.settings.items()
