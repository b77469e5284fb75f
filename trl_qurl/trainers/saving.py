"""Quantized checkpoints of the trained policy for `vllm serve`, and whole policies under FSDP.

For a quantized checkpoint, parameters come from the same source as for a sync (TRL's backend, which gathers FSDP and
ZeRO-3 shards and merges adapters temporarily). The engine and its weights are not touched.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, broadcast_object_list
from huggingface_hub import ModelCard

from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.storage import check_replaceable
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.adapter import FrozenBase, adapter_rank, adapter_tensors, engine_rank, write_adapter
from trl_qurl.rollout.backend import QuantizedVLLMGeneration

ADAPTER_DIRECTORY = "adapter"  # subdirectory of a quantized checkpoint


def write_quantized(
    generation: QuantizedVLLMGeneration,
    path: Path,
    weights: WeightStream,
    card: Callable[[int], ModelCard],
    base: FrozenBase | None = None,
) -> None:
    """Write a quantized checkpoint of the policy, and the card that `card` makes for the rank of an adapter, or 0.

    `weights` makes its tensors, smoothed as in the rollouts if it is the rollouts' own. If `base` is given, the
    rollouts' frozen base in this format, its adapter stays separate; otherwise adapters are merged. A collective
    operation.
    """
    model, smoothing = generation.model, weights.smoothing
    main_process_only(lambda: check_replaceable(path))
    writer = CheckpointWriter(generation.base_model, generation.processing_class, weights.scheme, weights.ignore)
    if base is None:
        parameters = generation.policy_parameters()
        with smoothing.paused() if smoothing else nullcontext():  # the next fit needs the weights of the last sync
            main_process_only(
                lambda: writer.write(weights.tensors(parameters), path, lambda tmp: card(0).save(tmp / "README.md")),
                parameters,
            )
        return
    tensors, adapter = base.quantized_tensors(), adapter_tensors(model)

    def write_beside(tmp: Path) -> None:
        write_adapter(model, adapter, tmp / ADAPTER_DIRECTORY)
        card(engine_rank(adapter_rank(model))).save(tmp / "README.md")

    main_process_only(lambda: writer.write(tensors, path, write_beside), itertools.chain(tensors, adapter))


def main_process_only(act: Callable[[], None], parameters: Iterable[Any] = ()) -> None:
    """Run `act` in the main process, and raise everywhere if it fails; all processes exhaust `parameters`."""
    error: Exception | None = None
    try:
        if PartialState().is_main_process:
            act()
    except Exception as failure:
        error = failure
    finally:
        # Gathering is collective, and the end of the iterator unmerges adapters.
        deque(parameters, maxlen=0)
    outcome = [None if error is None else f"{type(error).__name__}: {error}"]
    broadcast_object_list(outcome, from_process=0)
    if error is not None:
        raise error
    if outcome[0] is not None:
        raise RuntimeError(f"The main process could not save the quantized checkpoint. {outcome[0]}")


@contextmanager
def whole_state_dict(plugin: FullyShardedDataParallelPlugin) -> Iterator[None]:
    """Make transformers save whole weights under FSDP inside the block; `SHARDED_STATE_DICT` would save none."""
    state_dict_type = plugin.state_dict_type
    plugin.set_state_dict_type("FULL_STATE_DICT")
    try:
        yield
    finally:
        plugin.set_state_dict_type(state_dict_type)
