"""Checkpoint directories are complete or absent."""

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file
from support.disks import mounted

from trl_qurl.quantization.storage import new_directory, write_tensors


def test_a_directory_appears_or_is_replaced_only_when_complete(tmp_path):
    for text in ("old", "new"):
        with new_directory(tmp_path / "final") as draft:
            (draft / text).write_text(text)
            assert (tmp_path / "final" / text).exists() is False
        assert os.listdir(tmp_path) == ["final"] and os.listdir(tmp_path / "final") == [text]
    with pytest.raises(KeyError), new_directory(tmp_path / "final") as draft:
        (draft / "failed").write_text("half")
        raise KeyError
    assert os.listdir(tmp_path) == ["final"] and os.listdir(tmp_path / "final") == ["new"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with new_directory(tmp_path / "final"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "final").stat().st_mode) == 0o750


def test_shards_hold_every_tensor_once(tmp_path):
    # 64 bytes each, a shard of 100 bytes is flushed once it holds two: 2 + 2 + 1.
    tensors = {f"t{i}": torch.full((16,), float(i)) for i in range(5)}
    write_tensors(tensors.items(), tmp_path, shard_bytes=100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 64
    assert sorted(index["weight_map"]) == sorted(tensors)
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_a_tensor_may_change_after_it_was_taken(tmp_path):
    # As when an adapter is unmerged, or gathered shards are freed, before the shard is written.
    def stream():
        tensor = torch.ones(4)
        yield "t", tensor
        tensor.zero_()

    write_tensors(stream(), tmp_path)
    assert load_file(tmp_path / "model.safetensors")["t"].tolist() == [1.0] * 4


def test_a_parent_that_is_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    message = "checkpoint directory .*file/out cannot be written.*rollout_checkpoint_dir"
    with pytest.raises(OSError, match=message), new_directory(tmp_path / "file" / "out"):
        pass


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path):
    message = "No space left on device.*rollout_checkpoint_dir"
    with mounted(tmp_path / "small", "size=64k") as disk:  # less than one tensor
        with pytest.raises(OSError, match=message), new_directory(disk / "out") as draft:
            write_tensors([("t", torch.ones(10**6))], draft)
        assert not list(disk.iterdir())
