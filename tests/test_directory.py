"""The directory through which a run hands checkpoints to its engine: private, and gone when the run is."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from trl_qurl.rollout.directory import PREFIX, CheckpointDirectory

OWNER = """
import sys, time
from trl_qurl.rollout.directory import CheckpointDirectory
directory = CheckpointDirectory(sys.argv[1], 0)
(directory.path / "sync-1").mkdir()
print(directory.path, flush=True)
time.sleep(float(sys.argv[2]))
"""


def start_owner(parent, seconds):
    """Another run, which owns a directory in `parent` and ends after so many seconds."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, parent, str(seconds)], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def names(parent):
    return sorted(path.name for path in parent.iterdir())


def test_it_is_private_to_its_user(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), 0)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert directory.path.parent == tmp_path


def test_it_is_removed_with_its_object_or_before(tmp_path):
    directory = CheckpointDirectory(str(tmp_path), 0)
    (directory.path / "file").write_text("weights")
    directory.remove()
    assert names(tmp_path) == []
    directory.remove()  # a second time is no error
    directory = CheckpointDirectory(str(tmp_path), 0)
    del directory
    assert names(tmp_path) == []


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


def test_it_is_removed_when_its_process_ends(tmp_path):
    process, path = start_owner(tmp_path, 0)
    assert process.wait(30) == 0
    assert not os.path.exists(path)


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    process, path = start_owner(tmp_path, 60)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert os.path.exists(path), "nobody could have removed it"
    directory = CheckpointDirectory(str(tmp_path), 0)
    assert names(tmp_path) == [directory.path.name]


def test_what_others_use_is_left_alone(tmp_path):
    process, path = start_owner(tmp_path, 60)
    try:
        (tmp_path / f"{PREFIX}being-made").mkdir()  # no lock in it yet
        (tmp_path / "something else").mkdir()
        directory = CheckpointDirectory(str(tmp_path), 0)
        assert {os.path.basename(path), f"{PREFIX}being-made", "something else"} < set(names(tmp_path))
        assert directory.path.name != os.path.basename(path)
    finally:
        process.kill()
        process.wait(30)


def test_too_little_room_is_noticed_beforehand(tmp_path):
    with pytest.raises(OSError, match=r"GB are free and .* GB are needed.*rollout_checkpoint_dir"):
        CheckpointDirectory(str(tmp_path), 10**18)
    assert names(tmp_path) == []
