"""The directory for checkpoints between a run and its engine: private to the user, and removed with
the run.
"""

import os
import shutil
import signal
import stat
import subprocess

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from trl_qurl.quantization.files import PrivateDirectory
from trl_qurl.rollout.directory import CheckpointFolder


def private(parent):
    return PrivateDirectory(str(parent), 0)


def directories(parent):
    """The directories of runs; empty lock files stay beside them."""
    for path in parent.glob("*/*.lock"):
        assert path.stat().st_size == 0
    return sorted(path for path in parent.glob("*/*") if path.suffix != ".lock")


EXITS_SLOWLY = """
import sys, weakref
from trl_qurl.quantization.files import PrivateDirectory
directory = PrivateDirectory(sys.argv[1], 0)
print(directory.path, flush=True)
def wait():
    print("exiting", flush=True)
    sys.stdin.readline()
weakref.finalize(wait, wait)  # runs before the directory's, as that of an engine, which takes seconds
"""


def test_it_is_removed_with_its_object_or_before(tmp_path):
    directory = private(tmp_path)
    (directory.path / "file").write_text("weights")
    directory.remove()
    assert directories(tmp_path) == []
    directory.remove()  # a second call does nothing
    directory = private(tmp_path)
    del directory
    assert directories(tmp_path) == []


def test_its_name_is_the_same_for_the_next_run(tmp_path):
    """vLLM finds a compiled graph by the model's path, among other things."""
    first = private(tmp_path)
    beside = private(tmp_path)
    assert first.path != beside.path
    path = first.path
    first.remove()
    assert private(tmp_path).path == path


def test_lock_is_kept_until_the_directory_is_removed(warm_python, tmp_path):
    """Filelock unlocks when Python exits, maybe before: another run took the path, and lost it to
    this one.
    """
    command = [warm_python, "-c", EXITS_SLOWLY, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        path = process.stdout.readline().strip()
        assert process.stdout.readline() == "exiting\n"
        directory = private(tmp_path)
        assert str(directory.path) != path
        assert os.path.exists(path)
        process.communicate("")
    assert directory.path.exists()
    assert not os.path.exists(path)


def save(named_tensors, path):
    path.mkdir()
    save_file(dict(named_tensors), path / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(Accelerator(cpu=True), None, str(tmp_path), 0, is_served=False)


@pytest.mark.parametrize("vanished", ["parent", "home", "directory"])
def test_a_directory_that_vanishes_is_made_again(vanished, folder, tmp_path):
    """At logout, systemd removes a user's files in /dev/shm
    (RemoveIPC); cleaners remove old ones.
    """
    path = folder.path
    shutil.rmtree({"parent": tmp_path, "home": path.parent, "directory": path}[vanished])
    written = folder.write("sync-2", [("weight", torch.ones(2))], save)
    assert written.parent == path
    assert (written / "model.safetensors").exists()
    for each in (path, path.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    folder.remove("sync-2")
    assert not written.exists()


def test_directory_of_another_user_is_refused(tmp_path):
    """At the start, and when one that has vanished is made again."""
    if os.geteuid() != 0:
        pytest.skip("giving a directory to another user needs privileges")
    directory = private(tmp_path)
    os.chown(directory.path, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        directory.make()
    os.chown(directory.path.parent, 12345, 12345)
    with pytest.raises(OSError, match="belongs to another user.*rollout_checkpoint_dir"):
        private(tmp_path)


@pytest.mark.parametrize("runs", [80, pytest.param(4000, marks=pytest.mark.slow)])
def test_no_run_loses_its_directory_to_another(runs, run_scenario, tmp_path):
    """Runs start, fork, end and are killed at once. The next run removes what killed ones left, and
    nothing else.
    """
    (tmp_path / "rollouts" / "something else").mkdir(parents=True)
    record = run_scenario("concurrent_runs.py", tmp_path, runs)
    assert record["lost"] == []
    assert record["ends"].keys() == {"0", str(-signal.SIGKILL)}, "a run failed"
    assert sum(record["ends"].values()) == runs
    directory = private(tmp_path / "rollouts")
    left = directories(tmp_path / "rollouts")
    assert left == [directory.path], "directories of killed runs were not removed"
    assert (tmp_path / "rollouts" / "something else").exists()
