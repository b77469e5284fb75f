"""Commands in separate processes: what is said of a failure, and that no process is left behind."""

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import group_members

from trl_qurl.lab.processes import call_in_child, last_lines, run_child

SLEEPER = """
import os, subprocess, time
subprocess.Popen(["sleep", "600"])
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_failure_ends_with_what_was_printed_last(tmp_path):
    code = "import sys; [print('line', n) for n in range(99)]; sys.exit('no model')"
    with pytest.raises(ChildProcessError) as error:
        run_child([sys.executable, "-c", code], tmp_path / "output.log")
    message = str(error.value)
    assert "exited with status 1" in message
    assert str(tmp_path / "output.log") in message
    assert message.endswith("line 98\nno model")
    assert "line 70" not in message


def test_the_last_line_is_shown(tmp_path):
    shown = []
    run_child([sys.executable, "-c", "print('done')"], tmp_path / "log", shown.append)
    assert shown == ["done"]


def test_a_program_that_does_not_exist(tmp_path):
    with pytest.raises(ChildProcessError, match="Cannot start no-such-program: No such file"):
        run_child(["no-such-program"], tmp_path / "log")


@pytest.mark.parametrize(
    ("number", "status", "left"),
    [(signal.SIGTERM, 143, 0), (signal.SIGHUP, 129, 0), (signal.SIGKILL, -9, 1)],
)
def test_a_signal_ends_what_the_command_started_unless_it_kills(number, status, left, tmp_path):
    """As `trl-qurl doctor` in the middle of a trial, which has started a server. Nobody can end
    what the command started after a kill.
    """
    log = tmp_path / "log"
    command = [sys.executable, "-c", SLEEPER]
    code = f"""
import signal
from pathlib import Path
from trl_qurl.lab.processes import run_child
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` leaves it ignored
run_child({command!r}, Path({str(log)!r}), print, every=600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not (log.exists() and log.read_text().strip()):
        time.sleep(0.05)
    group = int(log.read_text())
    assert len(group_members(group)) == 2
    parent.send_signal(number)
    assert parent.wait(30) == status
    deadline = time.monotonic() + 10
    while len(group_members(group)) > left and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(group_members(group)) == left
    if left:
        os.killpg(group, signal.SIGKILL)


def test_the_last_lines_are_as_a_terminal_leaves_them(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n\n 0%|\r 50%|\r100%|\r\n\x1b[2Ksecond\xff\n   \n")
    assert last_lines(log, 3) == "first\n100%|\nsecond\ufffd"
    assert last_lines(log, 1) == "second\ufffd"


def half(number):
    """For a call in a child."""
    if number % 2:
        raise ValueError(f"{number} is odd")
    if number == 0:
        os._exit(3)
    if number == 6:
        atexit.register(os._exit, 5)  # when the process ends
    return number // 2


@pytest.mark.parametrize("shows_output", [True, False])
def test_a_call_returns_what_the_function_does_or_says_what_a_user_can_fix(
    shows_output, monkeypatch, capfd
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    assert call_in_child(half, 4, "lost", shows_output) == 2
    assert call_in_child(half, 6, "lost", shows_output) == 3
    for number in (0, 3):
        with pytest.raises(ChildProcessError, match="lost"):
            call_in_child(half, number, "lost", shows_output)
    assert capfd.readouterr().err.strip().endswith("trl-qurl: error: 3 is odd")
