"""The directory through which a run hands checkpoints to its engine: private, and gone when the run is."""

import os
import signal
import stat
import subprocess

import pytest

from trl_qurl.rollout.directory import CheckpointDirectory

OWNER = """
import os, sys, time
from trl_qurl.rollout.directory import CheckpointDirectory
directory = CheckpointDirectory(sys.argv[1], 0)
(directory.path / "sync-1").mkdir()
print(os.getpid(), directory.path, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def start_owner(warm_python):
    """Start another run, which owns a directory in `parent` and ends after so many seconds."""

    def start(parent, seconds):
        process = subprocess.Popen([warm_python, "-c", OWNER, parent, str(seconds)], stdout=subprocess.PIPE, text=True)
        owner, path = process.stdout.readline().split()
        return process, path, int(owner)

    return start


def directories(parent):
    """The directories of runs; empty lock files stay beside them."""
    assert all(path.stat().st_size == 0 for path in parent.glob("*/*.lock"))
    return sorted(path for path in parent.glob("*/*") if path.suffix != ".lock")


EXITS_SLOWLY = """
import sys, weakref
from trl_qurl.rollout.directory import CheckpointDirectory
directory = CheckpointDirectory(sys.argv[1], 0)
print(directory.path, flush=True)
def wait():
    print("exiting", flush=True)
    sys.stdin.readline()
weakref.finalize(wait, wait)  # runs before the directory's, as that of an engine, which takes seconds
"""


def test_it_is_private_to_its_user(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), 0)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.path.parent.stat().st_mode) == 0o700
    assert directory.path.parent.parent == tmp_path


def test_it_is_removed_with_its_object_or_before(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), 0)
    (directory.path / "file").write_text("weights")
    directory.remove()
    assert directories(tmp_path) == []
    directory.remove()  # a second time is no error
    directory = CheckpointDirectory(str(tmp_path), 0)
    del directory
    assert directories(tmp_path) == []


def test_a_fork_that_ends_leaves_it_alone(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), 0)
    if os.fork() == 0:
        directory.remove()
        os._exit(0)
    os.wait()
    assert directory.path.exists()


def test_its_name_is_the_same_for_the_next_run(tmp_path):
    """vLLM finds a compiled graph by the model's path, among other things."""
    first = CheckpointDirectory(str(tmp_path), 0)
    beside = CheckpointDirectory(str(tmp_path), 0)
    assert first.path != beside.path
    path = first.path
    first.remove()
    assert CheckpointDirectory(str(tmp_path), 0).path == path


def test_it_is_removed_when_its_process_ends(start_owner, tmp_path):
    process, path, _ = start_owner(tmp_path, 0)
    assert process.wait(30) == 0
    assert not os.path.exists(path)


def test_what_a_killed_run_left_is_removed_by_the_next(start_owner, tmp_path):
    process, path, owner = start_owner(tmp_path, 60)
    os.kill(owner, signal.SIGKILL)
    process.wait(30)
    assert os.path.exists(path), "nobody could have removed it"
    directory = CheckpointDirectory(str(tmp_path), 0)
    assert directories(tmp_path) == [directory.path]


def test_what_others_use_is_left_alone(start_owner, tmp_path):
    process, path, _ = start_owner(tmp_path, 60)
    try:
        (tmp_path / "something else").mkdir()
        directory = CheckpointDirectory(str(tmp_path), 0)
        assert os.path.exists(f"{path}/sync-1") and (tmp_path / "something else").exists()
        assert str(directory.path) != path
    finally:
        process.kill()
        process.wait(30)


def test_a_run_that_exits_keeps_its_lock_until_its_directory_is_gone(warm_python, tmp_path):
    """Filelock unlocks when Python exits, maybe before: another run took the path, and lost it to this one."""
    command = [warm_python, "-c", EXITS_SLOWLY, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        path, exiting = (process.stdout.readline().strip() for _ in range(2))
        assert exiting == "exiting"
        directory = CheckpointDirectory(str(tmp_path), 0)
        assert str(directory.path) != path and os.path.exists(path)
        process.communicate("")
    assert directory.path.exists() and not os.path.exists(path)


def test_a_directory_that_somebody_else_prepared_is_not_used(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("giving a directory to another user needs privileges")
    home = CheckpointDirectory(str(tmp_path), 0).path.parent
    os.chown(home, 12345, 12345)
    with pytest.raises(OSError, match="belongs to another user.*rollout_checkpoint_dir"):
        CheckpointDirectory(str(tmp_path), 0)


@pytest.mark.parametrize("runs", [80, pytest.param(4000, marks=pytest.mark.slow)])
def test_no_run_loses_its_directory_while_others_start_end_and_are_killed(runs, run_scenario, tmp_path):
    record = run_scenario("concurrent_runs.py", tmp_path, runs)
    assert record["lost"] == []
    assert record["ends"].keys() == {"0", str(-signal.SIGKILL)}, "a run failed"
    assert sum(record["ends"].values()) == runs
    directory = CheckpointDirectory(str(tmp_path / "rollouts"), 0)
    assert directories(tmp_path / "rollouts") == [directory.path], "what killed runs left was not removed"


def test_too_little_room_is_noticed_beforehand(tmp_path):
    with pytest.raises(OSError, match=r"GB are free and .* GB are needed.*rollout_checkpoint_dir"):
        CheckpointDirectory(str(tmp_path), 10**18)
    assert directories(tmp_path) == []
