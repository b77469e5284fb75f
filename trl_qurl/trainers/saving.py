"""Quantized checkpoints of the policy, and the state of a rollout in a run's checkpoints.

A quantized checkpoint reads parameters as a sync does (`merging.py`), and leaves the engine alone.

TRL keeps a rollout's tokens only in memory. Without its state, a small file per process, a run that
resumes inside a rollout would sample again and lose its place in the data.
"""

import functools
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.utils import gather_object, send_to_device
from trl.trainer.utils import RepeatSampler

from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.checkpoint_form import NamedTensors, plain_model
from trl_qurl.quantization.checks.output import check_replaceable
from trl_qurl.quantization.files import write_atomically
from trl_qurl.quantization.plan import Formats, format_name, make_plan, require_formats
from trl_qurl.quantization.storage import set_dtype
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.adapter import adapter_tensors, write_adapter
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.group import TOGETHER

logger = get_logger(__name__)  # logs in the main process only

ADAPTER_DIRECTORY = "adapter"  # subdirectory of a quantized checkpoint
STATE_FILE = "rollout_state_{}.pt"  # in a checkpoint, by process

SHAPE = (
    "per_device_train_batch_size",
    "num_generations",
    "steps_per_generation",
    "num_iterations",
    "gradient_accumulation_steps",
    "beta",
    "vllm_importance_sampling_correction",
    "temperature",
    "cast_lm_head_to_fp32",
    "top_k",
    "top_p",
    "min_p",
    "vllm_structured_outputs_regex",
    "generation_kwargs",
)
"""Settings that decide what a rollout's batches hold, how its tokens were sampled and scored, and
which batch comes next.
"""

Part = TypeVar("Part")


def save_quantized(
    trainer: Any,
    output_dir: str | os.PathLike[str] | None,
    formats: Formats,
    ignore: Collection[str] | None,
    merge: bool,
) -> Path:
    """Do what a trainer's `save_quantized` says. A collective operation."""
    args = trainer.args
    if formats is None:
        formats = args.rollout_quantization
    formats = require_formats(formats, "formats")
    if ignore is None:
        ignore = args.quantization_ignore
    ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    if output_dir is None:
        run = Path(args.output_dir).absolute()
        path = run.with_name(f"{run.name}-{format_name(formats)}")
    else:
        path = Path(output_dir)
    TOGETHER.from_main(lambda: check_replaceable(path))
    generation = trainer.vllm_generation
    weights = generation.weights
    # As text, because the order of patterns matters.
    has_same_formats = str(formats) == str(args.rollout_quantization)
    is_rollouts = has_same_formats and ignore == args.quantization_ignore
    if not is_rollouts:
        # A new stream raises in every process or in none. It is not smoothed: nobody has seen its
        # activations.
        weights = WeightStream(generation.model, make_plan(generation.model, formats, ignore))
    if is_rollouts and not merge and not generation.sync.route.is_merged:
        write_base_and_adapter(generation, path, weights)
    else:
        write_merged(generation, path, weights)
    return path


def write_merged(generation: QuantizedVLLMGeneration, path: Path, weights: WeightStream) -> None:
    """Write the policy, quantized, with its adapter merged. A collective operation."""
    writer = _writer(generation, weights)
    set_grid = functools.partial(set_dtype, dtype=generation.weights.grid)

    def write(parameters: NamedTensors) -> None:
        writer.write(weights.tensors(parameters), path, set_grid)

    with weights.smoothing.pause() if weights.smoothing else nullcontext():
        read_in_main_process(generation.policy_parameters(), write)


def write_base_and_adapter(
    generation: QuantizedVLLMGeneration, path: Path, weights: WeightStream
) -> None:
    """Write the quantized base that the engine started from, and the adapter in a subdirectory.

    A collective operation.
    """
    model = generation.model
    writer = _writer(generation, weights)
    # The main process alone notices if the base's files are gone.
    base = TOGETHER.run(generation.sync.route.starting_tensors)
    # Copied, because a launcher may free them again.
    adapter = [(name, tensor.to("cpu", copy=True)) for name, tensor in adapter_tensors(model)]

    def write_beside(tmp: Path) -> None:
        write_adapter(model, adapter, tmp / ADAPTER_DIRECTORY)
        set_dtype(tmp, generation.weights.grid)

    read_in_main_process(base, lambda tensors: writer.write(tensors, path, write_beside))


def _writer(generation: QuantizedVLLMGeneration, weights: WeightStream) -> CheckpointWriter:
    model = plain_model(generation.model)
    return CheckpointWriter(model, generation.processing_class, weights.plan)


def read_in_main_process(parts: Iterable[Part], read: Callable[[Iterator[Part]], None]) -> None:
    """Let `read` go through the parts in the main process, and raise its error everywhere.

    Making a part may be collective. So the other processes go through all of them, too, and after
    an error the main process goes through the rest.
    """
    unread = iter(parts)

    def skip() -> None:
        deque(unread, maxlen=0)

    def read_or_skip() -> None:
        if PartialState().is_main_process:
            read(unread)
        else:
            skip()

    TOGETHER.run(read_or_skip, join=skip)


def save_rollout_state(
    state: dict[str, Any], checkpoint: Path, accelerator: Accelerator, args: Any
) -> None:
    """Write this process's state into a checkpoint directory, complete or not at all."""
    path = checkpoint / STATE_FILE.format(accelerator.process_index)
    checkpoint.mkdir(parents=True, exist_ok=True)
    contents = state | {"shape": _shape(accelerator, args)}
    write_atomically(path, lambda tmp: torch.save(contents, tmp))


def _shape(accelerator: Accelerator, args: Any) -> dict[str, Any]:
    settings = {name: getattr(args, name, None) for name in SHAPE}  # RLOO lacks some
    return settings | {"processes": accelerator.num_processes}


def load_rollout_state(
    checkpoint: Path, accelerator: Accelerator, args: Any
) -> dict[str, Any] | None:
    """Read this process's state, without a rollout of another shape; `None` if one is missing."""
    path = checkpoint / STATE_FILE.format(accelerator.process_index)
    if not all(gather_object([path.exists()])):
        return None  # processes without a file would start over, and the others would not
    # Load via the CPU: torch cannot load directly to "cpu:0", the device of processes in a
    # distributed CPU run.
    state = torch.load(path, map_location="cpu", weights_only=True)
    shape = _shape(accelerator, args)
    changed = [name for name, value in state["shape"].items() if value != shape[name]]
    if changed:
        logger.warning(
            f"This run generates a new rollout instead of the checkpoint's: {', '.join(changed)} "
            "changed."
        )
        state |= {"step": 0, "batches": None}
    return send_to_device(state, accelerator.device)


def skip_epochs(sampler: RepeatSampler | None, epoch: float | None) -> None:
    """Draw the orders of completed epochs again, for a resumed process seeds its sampler again."""
    if sampler is None or not sampler.shuffle:
        return
    for _ in range(int(epoch or 0)):
        next(iter(sampler))
