"""Files of a checkpoint: tensors from a stream, written in shards, and `config.json`.

Memory holds one shard at a time.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.quantization.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_tensors(
    named_tensors: NamedTensors, directory: Path, shard_bytes: int = 2 * 1024**3
) -> None:
    """Write tensors as `model.safetensors`, or as shards with an index.

    This uses about `shard_bytes` of memory.
    """
    weight_map: dict[str, str] = {}  # the file of each tensor
    total = 0
    count = 0
    for count, shard in enumerate(_shards(named_tensors, shard_bytes), 1):
        file_name = f"model-{count:05d}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
        total += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # before the next one grows
    if count == 1:
        os.replace(directory / "model-00001.safetensors", directory / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(named_tensors: NamedTensors, shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield copies of tensors in host memory, about `shard_bytes` at a time."""
    shard: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in named_tensors:
        # Copy now: before this is written, the parameter's shards may be freed.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        filled += tensor.nbytes
        if filled >= shard_bytes:
            yield shard
            shard = {}
            filled = 0
    if shard:
        yield shard


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint one at a time.

    Raises `FileNotFoundError` if there are none.
    """
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(
            f"{directory} contains no .safetensors file that this process can see."
        )
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, safetensors' handle is not a dictionary
                yield name, file.get_tensor(name)


def tensor_shapes(directory: Path) -> dict[str, list[int]]:
    """Read the shapes of a checkpoint's tensors, by name, from the headers of its files."""
    shapes = {}
    for shard in directory.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shapes[name] = file.get_slice(name).get_shape()
    return shapes


def write_config(model: "PreTrainedModel", directory: Path, quantization: dict | None) -> None:
    """Write the model's `config.json` with a `quantization_config` entry.

    The model's config object does not change. Copies classes that came with the checkpoint
    (`trust_remote_code`) next to it, where `auto_map` refers to them.
    """
    from transformers.dynamic_module_utils import custom_object_save

    contents = model.config.to_dict()
    remote_objects = [item for item in (model.config, model) if item.is_remote_code()]
    for item in remote_objects:
        custom_object_save(item, directory, contents)
    if not remote_objects:  # the class is transformers' own, so its name is enough
        contents.pop("auto_map", None)
    contents.pop("_name_or_path", None)
    contents["architectures"] = model.config.architectures or [type(model).__name__]
    if quantization is not None:
        contents["quantization_config"] = quantization
    (directory / "config.json").write_text(
        json.dumps(contents, indent=2, sort_keys=True, default=str) + "\n"
    )


def set_dtype(directory: Path, dtype: torch.dtype | None) -> None:
    """Have float32 weights loaded in the type that autocast rounded them to.

    In training, no pass saw the rest.
    """
    path = directory / "config.json"
    if dtype is None or not path.exists():  # an adapter has no config.json
        return
    contents = json.loads(path.read_text(encoding="utf-8"))
    for config in (contents, contents.get("text_config") or {}):
        if config.get("dtype") in ("float32", None):
            config["dtype"] = str(dtype).removeprefix("torch.")
    text = json.dumps(contents, indent=2) + "\n"
    write_atomically(path, lambda tmp: tmp.write_text(text, encoding="utf-8"))
