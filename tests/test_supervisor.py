"""`trl-qurl serve --restart` with small programs in the place of a server, which dies as servers do."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import group_members

SUPERVISE = (
    "import os, sys\n"
    "from trl_qurl.rollout.engine.supervisor import supervise\n"
    "sys.exit(supervise([sys.executable, '-c', sys.argv[1]], os.environ))\n"
)

COUNT_AND_DIE = """
import os, sys
with open({path!r}, "a") as file:
    file.write("started\\n")
{then}
"""

SERVE = """
import os, signal, subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
with open({path!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
time.sleep(600)
"""


def supervised(program):
    return subprocess.Popen([sys.executable, "-c", SUPERVISE, program], stderr=subprocess.PIPE, text=True)


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("then", "starts", "status"),
    [("sys.exit(3)", 5, 3), ("os.kill(os.getpid(), 9)", 5, 137), ("sys.exit(0)", 1, 0)],
    ids=["fails", "is killed", "ends"],
)
def test_a_server_that_dies_at_once_is_started_a_few_times(then, starts, status, tmp_path):
    path = tmp_path / "starts"
    process = supervised(COUNT_AND_DIE.format(path=str(path), then=then))
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert len(lines(path)) == starts
    assert said.count("the server died") == starts - 1


def test_a_killed_server_is_started_again_and_leaves_nothing(tmp_path):
    path = tmp_path / "servers"
    process = supervised(SERVE.format(path=str(path)))
    try:
        first = int(wait_for(lambda: lines(path))[0])
        os.kill(first, signal.SIGKILL)  # not its children
        second = int(wait_for(lambda: lines(path)[1:])[0])
        assert not group_members(first), "what it started would keep its memory"
        assert len(group_members(second)) == 3
    finally:
        process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    wait_for(lambda: not group_members(second))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_no_other_is_started(number, tmp_path):
    path = tmp_path / "servers"
    process = supervised(SERVE.format(path=str(path)))
    server = int(wait_for(lambda: lines(path))[0])
    process.send_signal(number)
    assert process.wait(30) != 0
    wait_for(lambda: not group_members(server))
    assert len(lines(path)) == 1


def test_a_server_ends_with_a_supervisor_that_is_killed(tmp_path):
    path = tmp_path / "servers"
    process = supervised(SERVE.format(path=str(path)))
    server = int(wait_for(lambda: lines(path))[0])
    process.kill()
    process.wait(30)
    wait_for(lambda: server not in group_members(server))
    os.killpg(server, signal.SIGKILL)  # the children of this stand-in, which vLLM's notice by themselves
