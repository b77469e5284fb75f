"""Checkpoint directories are complete or absent."""

import json
import multiprocessing
import os
import signal
import stat
import time

import pytest
import torch
from safetensors.torch import load_file
from support.disks import mounted

from trl_qurl.quantization.files import CACHE_VARIABLE, cached, new_directory
from trl_qurl.quantization.storage import write_tensors


def tree(path):
    """What is below a directory, hidden or not."""
    return sorted(str(below.relative_to(path)) for below in path.rglob("*"))


def make_empty(path):
    with new_directory(path):
        pass


def test_a_directory_appears_or_is_replaced_only_when_complete(tmp_path):
    for text in ("old", "new"):
        with new_directory(tmp_path / "final") as draft:
            (draft / text).write_text(text)
            assert not (tmp_path / "final" / text).exists()
        assert tree(tmp_path) == ["final", f"final/{text}"]
    with pytest.raises(KeyError), new_directory(tmp_path / "final") as draft:
        (draft / "failed").write_text("half")
        raise KeyError
    assert tree(tmp_path) == ["final", "final/new"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        make_empty(tmp_path / "final")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "final").stat().st_mode) == 0o750


def test_shards_hold_every_tensor_once(tmp_path):
    # 64 bytes each, a shard of 100 bytes is flushed once it holds two: 2 + 2 + 1.
    tensors = {f"t{i}": torch.full((16,), float(i)) for i in range(5)}
    write_tensors(tensors.items(), tmp_path, shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    places = index["weight_map"]
    assert index["metadata"]["total_size"] == 5 * 64
    assert places.keys() == tensors.keys()
    assert len({*places.values()}) == 3
    for name, file in places.items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_a_tensor_may_change_after_it_was_taken(tmp_path):
    # As when an adapter is unmerged, or gathered shards are freed, before the shard is written.
    def stream():
        tensor = torch.ones(4)
        yield "t", tensor
        tensor.zero_()

    write_tensors(stream(), tmp_path)
    assert load_file(tmp_path / "model.safetensors")["t"].tolist() == [1, 1, 1, 1]


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path):
    message = "No space left on device.*rollout_checkpoint_dir.*TRL_QURL_CACHE"
    with mounted(tmp_path / "small", "size=64k") as disk:  # less than one tensor
        with pytest.raises(OSError, match=message), new_directory(disk / "out") as draft:
            write_tensors([("t", torch.ones(10**6))], draft)
        assert not list(disk.iterdir())


# Processes that end
# --------------------------------------------------------------------------------------------------


def write_for_a_minute(path):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored
    with new_directory(path) as draft:
        (draft / "half").write_text("half")
        try:
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)  # must not interrupt what cleans up


def writing(path):
    """A process that writes a directory, once it has begun."""
    process = multiprocessing.get_context("fork").Process(target=write_for_a_minute, args=[path])
    process.start()
    deadline = time.monotonic() + 30
    while not list(path.parent.glob(".*/*/half")):
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def end(process, number):
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_asked_to_end_leaves_nothing(number, tmp_path):
    process = writing(tmp_path / "final")
    end(process, number)
    assert process.exitcode == 128 + number
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["final", "final[1]"])
def test_what_a_killed_process_left_goes_with_the_next_one(name, tmp_path):
    process = writing(tmp_path / name)
    make_empty(tmp_path / "another")
    assert [*tmp_path.glob(".*/*/half")], "it was taken from another directory's writer"
    end(process, signal.SIGKILL)
    make_empty(tmp_path / name)
    assert set(os.listdir(tmp_path)) == {name, "another"}


def test_of_two_that_write_at_once_the_first_fails(tmp_path):
    path = tmp_path / "final"
    with pytest.raises(OSError, match="final cannot be written"), new_directory(path):
        make_empty(path)
        (path / "second").touch()
    assert tree(tmp_path) == ["final", "final/second"]


def test_an_old_directory_comes_back_if_it_cannot_be_replaced(tmp_path, monkeypatch):
    with new_directory(tmp_path / "final") as draft:
        (draft / "old").touch()
    replace = os.replace

    def fail(source, target):
        if target == tmp_path / "final" and source.name != "replaced":
            raise OSError("no room")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        make_empty(tmp_path / "final")
    assert tree(tmp_path) == ["final", "final/old"]


def test_a_cache_that_cannot_be_written_names_its_variable(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"{tmp_path}/file/model cannot .*{CACHE_VARIABLE}"):
        cached(tmp_path / "file" / "model", lambda path: None)
