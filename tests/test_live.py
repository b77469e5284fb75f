"""Runs in a notebook: what is drawn meanwhile, what is said of a failure, and that no process is left behind."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import group_members

from trl_qurl.lab import processes
from trl_qurl.lab.processes import last_lines, run_child
from trl_qurl.lab.report import live

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("IPython", "matplotlib")),
    reason="needs IPython and matplotlib (trl-qurl[report], ipykernel)",
)

SETTINGS = {"rollout_quantization": "int8", "objective": "acr", "updates_per_rollout": 4, "max_steps": 8}

TRAINER = """
import sys, time
from trl_qurl.trainers.run_log import RunLog

log = RunLog(sys.argv[1] + "/run.jsonl")
log.begin({settings!r}, 0)
for step in (4, 8):
    log.append({{"step": step, "reward": step / 10, "mismatch/kl_k3": 1e-3, "eval_sums/actor_avg@1": 0.5}})
    print("made step", step)
    time.sleep(0.4)
"""

SLEEPER = """
import os, subprocess, time
subprocess.Popen(["sleep", "600"])
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook would show, one entry for each time that it is drawn again."""

    class Handle(list):
        def update(self, html):
            self.append(html.data)

    shown = Handle()
    monkeypatch.setattr("IPython.display.display", lambda html, display_id: shown)
    return shown


def trainer(directory: Path, **settings) -> list:
    script = directory / "train.py"
    script.write_text(TRAINER.format(settings=SETTINGS | settings))
    return [sys.executable, script, directory / "run"]


def write_run(directory: Path, **settings) -> Path:
    directory.mkdir()
    rows = [{"step": 4, "reward": 0.1, "time/generate_s": 1.0}, {"step": 8, "reward": 0.2, "time/generate_s": 2.0}]
    lines = [{"settings": SETTINGS | settings}, *rows]
    (directory / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def alone_after(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not group_members(group)


# Drawing -------------------------------------------------------------------------------------------------------------


def test_a_run_is_drawn_while_it_goes_on(notebook, tmp_path):
    run = live.watch(trainer(tmp_path), tmp_path / "run", every=0.1)
    assert run.series("reward") == [(4, 0.4), (8, 0.8)]
    assert (tmp_path / "run" / "output.log").read_text() == "made step 4\nmade step 8\n"
    midway = [html for html in notebook if "step 4 of 8" in html]
    assert midway and all("running" in html for html in midway) and any("made step 4" in html for html in midway)
    assert "done" in notebook[-1] and "step 8 of 8" in notebook[-1] and "made step" not in notebook[-1]
    titles = re.findall(r"Lines over rollouts, (.*?) \([mns]", notebook[-1])
    assert titles == ["Reward of the rollouts", "sums, answered by the actor", "KL(behavior ‖ proximal)"]


def test_an_earlier_run_in_the_same_place_is_not_drawn(notebook, tmp_path):
    write_run(tmp_path / "run", max_steps=77)
    live.watch(trainer(tmp_path), tmp_path / "run", every=0.1)
    assert not any("of 77" in html for html in notebook) and "step 8 of 8" in notebook[-1]


def test_metrics_can_be_chosen(notebook, tmp_path):
    live.watch(trainer(tmp_path), tmp_path / "run", metrics=["mismatch/kl_k3"])
    assert "Reward of" not in notebook[-1] and "KL" in notebook[-1]


def test_a_command_that_trains_elsewhere_is_an_error(notebook, tmp_path):
    with pytest.raises(FileNotFoundError, match="did not write run.jsonl.*pass the trainer's output_dir"):
        live.watch(trainer(tmp_path), tmp_path / "other")


def test_without_a_notebook_nothing_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr("IPython.display.display", lambda html, display_id: None)  # as in a plain Python
    with pytest.raises(RuntimeError, match="needs a notebook"):
        live.watch(trainer(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_runs_side_by_side_are_named_by_their_formats(tmp_path):
    runs = [write_run(tmp_path / "int8"), write_run(tmp_path / "sixteen", rollout_quantization=None)]
    reward, seconds = re.findall(r'<img alt="([^"]+)"', live.compare(runs).data)
    assert "At the end: INT8 0.2; BF16 0.2." in reward
    assert "INT8 generation 2 s; BF16 generation 2 s" in seconds  # the first rollout, which warms up, is left out


# Processes -----------------------------------------------------------------------------------------------------------


def test_a_failure_ends_with_what_was_printed_last(notebook, tmp_path):
    code = (
        "import sys; [print('line', n) for n in range(99)]; print('10%\\r50%'); sys.exit('\\x1b[31mno model\\x1b[0m')"
    )
    with pytest.raises(ChildProcessError) as error:
        live.watch([sys.executable, "-c", code], tmp_path)
    message = str(error.value)
    assert "failed with exit status 1" in message and f"in {tmp_path / 'output.log'}" in message
    assert message.endswith("line 98\n50%\nno model") and "line 70" not in message


def test_a_program_that_does_not_exist(tmp_path):
    with pytest.raises(ChildProcessError, match="Cannot start no-such-program: No such file"):
        run_child(["no-such-program"], tmp_path / "log")


def test_an_interrupt_ends_the_command_and_what_it_started(tmp_path):
    groups = []

    def interrupt(printed: str) -> None:
        if printed:
            groups.append(int(printed))
            assert len(group_members(groups[0])) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child([sys.executable, "-c", SLEEPER], tmp_path / "log", interrupt, every=0.1)
    assert alone_after(groups[0], 10)  # the system takes a moment to end what was killed


def test_a_kernel_that_is_killed_takes_the_command_along(tmp_path):
    code = f"""
from pathlib import Path
from trl_qurl.lab.processes import run_child
run_child(["sleep", "600"], Path({str(tmp_path / "log")!r}), print, every=600)
"""
    kernel = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    children: list[str] = []
    while time.monotonic() < deadline:
        children = Path(f"/proc/{kernel.pid}/task/{kernel.pid}/children").read_text().split()
        if children and "sleep\x00600" in Path(f"/proc/{children[0]}/cmdline").read_text():
            break
        time.sleep(0.05)
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.wait()
    assert alone_after(int(children[0]), 10)


def test_the_last_lines_are_as_a_terminal_leaves_them(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n\n 0%|\r 50%|\r100%|\r\n\x1b[2Ksecond\xff\n   \n")
    assert last_lines(log, 3) == "first\n100%|\nsecond\ufffd"
    assert last_lines(log, 1) == "second\ufffd"


def test_becoming_a_command_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(processes, "die_with_parent", lambda: None)
    assert processes.main(["no-such-program"]) == 127
    assert "Cannot start no-such-program" in capsys.readouterr().err
