"""Quantized checkpoints of the policy for `vllm serve`, and the state of a rollout in a run's
checkpoints.

A quantized checkpoint reads parameters as a sync does (`merging.py`), and leaves the engine alone.

TRL keeps a rollout's tokens only in memory. Without its state, a small file per process, a run that
resumes inside a rollout would sample again and lose its place in the data.
"""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.utils import gather_object, send_to_device
from huggingface_hub import ModelCard
from trl.trainer.utils import RepeatSampler

from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.checkpoint_form import plain_model
from trl_qurl.quantization.storage import check_replaceable, set_dtype
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.adapter import adapter_rank, adapter_tensors, engine_rank, write_adapter
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.recovery import raise_everywhere
from trl_qurl.rollout.routes import Route

logger = get_logger(__name__)  # logs in the main process only

ADAPTER_DIRECTORY = "adapter"  # subdirectory of a quantized checkpoint
STATE_FILE = "rollout_state_{}.pt"  # in a checkpoint, by process

SHAPE = (
    *("per_device_train_batch_size", "num_generations", "steps_per_generation", "num_iterations"),
    *("gradient_accumulation_steps", "beta", "vllm_importance_sampling_correction"),
)
"""Settings that decide what a rollout's batches hold, and which of them comes next."""


def write_quantized(
    generation: QuantizedVLLMGeneration,
    path: Path,
    weights: WeightStream,
    card: Callable[[int], ModelCard],
    route: Route | None = None,
) -> None:
    """Write a quantized checkpoint of the policy, and the card that `card` makes for the rank of an
    adapter, or 0.

    `weights` makes its tensors. With the `route` of an adapter that rollouts kept separate, it
    stays so beside their frozen base; otherwise adapters are merged. A collective operation.
    """
    model, smoothing = generation.model, weights.smoothing
    main_process_only(lambda: check_replaceable(path))
    writer = CheckpointWriter(plain_model(model), generation.processing_class, weights.plan)
    parameters: Iterable[Any]
    if route is None:
        parameters = generation.policy_parameters()
        tensors, adapter, rank = weights.tensors(parameters), None, 0
    else:
        tensors, adapter, rank = (
            route.starting_tensors(),
            adapter_tensors(model),
            engine_rank(adapter_rank(model)),
        )
        parameters = itertools.chain(tensors, adapter)

    def write_beside(tmp: Path) -> None:
        if adapter is not None:
            write_adapter(model, adapter, tmp / ADAPTER_DIRECTORY)
        card(rank).save(tmp / "README.md")
        set_dtype(tmp, generation.weights.grid)

    with smoothing.pause() if smoothing else nullcontext():
        main_process_only(lambda: writer.write(tensors, path, write_beside), parameters)


def main_process_only(act: Callable[[], None], parameters: Iterable[Any] = ()) -> None:
    """Run `act` in the main process, and raise its error everywhere; all processes exhaust
    `parameters`.
    """
    # gathering is collective
    drain: Callable[[], object] = functools.partial(deque, parameters, maxlen=0)
    raise_everywhere(lambda: act() if PartialState().is_main_process else drain(), join=drain)


def save_rollout_state(
    state: dict[str, Any], checkpoint: Path, accelerator: Accelerator, args: Any
) -> None:
    """Write this process's state into a checkpoint directory, complete or not at all."""
    path = checkpoint / STATE_FILE.format(accelerator.process_index)
    checkpoint.mkdir(parents=True, exist_ok=True)
    shape = {name: getattr(args, name, None) for name in SHAPE}  # RLOO lacks some
    torch.save(
        state | {"processes": accelerator.num_processes, "shape": shape},
        tmp := path.with_suffix(".tmp"),
    )
    tmp.replace(path)


def load_rollout_state(
    checkpoint: Path, accelerator: Accelerator, args: Any
) -> dict[str, Any] | None:
    """Read this process's state, without a rollout of another shape; `None` if missing or of other
    processes.
    """
    path = checkpoint / STATE_FILE.format(accelerator.process_index)
    if not all(gather_object([path.exists()])):
        return None  # processes without a file would start over, and the others would not
    # Load via the CPU: torch cannot load directly to "cpu:0", the device of processes in a
    # distributed CPU run.
    state = torch.load(path, map_location="cpu", weights_only=True)
    changed = [name for name, value in state["shape"].items() if value != getattr(args, name, None)]
    if changed:
        logger.warning(
            f"This run generates a new rollout instead of the checkpoint's: {', '.join(changed)} "
            "changed."
        )
        state |= {"step": 0, "batches": None, "ahead": None}
    # Otherwise processes with a file would continue the rollout and draws of prompts, and those
    # without start over.
    return (
        send_to_device(state, accelerator.device)
        if state["processes"] == accelerator.num_processes
        else None
    )


def skip_epochs(sampler: RepeatSampler | None, epoch: float | None) -> None:
    """Draw the orders of completed epochs again: a resumed process seeds the sampler's generator
    again.
    """
    if sampler is not None and sampler.shuffle:
        for _ in range(int(epoch or 0)):
            next(iter(sampler))
