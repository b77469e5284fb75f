"""What comes back after a stop: complete checkpoints, and a proof that models are the saved ones.

transformers looks for the last checkpoint by its name, complete or not. It loads the adapters of
subdirectories, such as TRL's `ref/` and our `critic/`, instead of the policy's own; and where a
model's parameters have other names or shapes than its checkpoint's tensors, as experts do, it
leaves them as they are and logs their names.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, is_peft_model
from accelerate.utils.constants import FSDP_MODEL_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl_qurl.quantization.checkpoint_form import CheckpointForm, NamedTensors
from trl_qurl.quantization.merging import gathered, model_parameters
from trl_qurl.quantization.storage import read_tensors
from trl_qurl.rollout.checks.tensors import differences, tensor_digest

logger = get_logger(__name__)  # logs in the main process only

ADAPTER_FILE = "adapter_model.safetensors"
# in its RuntimeError on a full disk
TORCH_CANNOT_WRITE = ("inline_container", "PytorchStreamWriter", "iostream")
STATE_FILE = "trainer_state.json"  # transformers writes it last


def last_complete_checkpoint(output_dir: str | Path) -> Path:
    """Return the newest complete checkpoint of a run, and log which ones it passes over.

    Raises:
        ValueError: The directory has no complete checkpoint, as in transformers.
    """
    output_dir = Path(output_dir)
    checkpoints = sorted(output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=_step, reverse=True)
    incomplete: list[str] = []
    for checkpoint in checkpoints:
        if is_complete(checkpoint):
            if incomplete:
                names = ", ".join(incomplete)
                logger.warning(
                    f"Resuming from {checkpoint}: {names} is incomplete, as after a full disk or a "
                    "kill."
                )
            return checkpoint
        incomplete.append(checkpoint.name)
    found = f"are only incomplete ones ({', '.join(incomplete)})" if incomplete else "is none"
    raise ValueError(
        f"resume_from_checkpoint=True looks for a checkpoint in {output_dir} (output_dir), but "
        f"there {found}: pass the path of a checkpoint, or leave resume_from_checkpoint out to "
        "begin a new run."
    )


def check_complete(checkpoint: str | Path) -> Path:
    """Return a checkpoint's path; raise `FileNotFoundError` unless it exists and is complete."""
    checkpoint = Path(checkpoint)
    if not checkpoint.is_dir():
        raise FileNotFoundError(
            f"resume_from_checkpoint is {str(checkpoint)!r}, but there is no such directory."
        )
    if not is_complete(checkpoint):
        raise FileNotFoundError(
            f"The checkpoint {checkpoint} is incomplete ({STATE_FILE} is missing or cut short), as "
            "after a full disk or a kill: pass an earlier one, or resume_from_checkpoint=True for "
            "the last complete one."
        )
    return checkpoint


def check_split_weights(checkpoint: Path) -> None:
    """Raise `FileNotFoundError` unless a checkpoint has the weights that FSDP resumes with."""
    if not any(checkpoint.glob(f"{FSDP_MODEL_NAME}*")):
        raise FileNotFoundError(
            f"The checkpoint {checkpoint} has no {FSDP_MODEL_NAME}*, without which FSDP cannot "
            "resume, as with save_only_model=True: begin a new run with that path as the model."
        )


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end."""
    try:
        TrainerState.load_from_json(str(checkpoint / STATE_FILE))
    except (OSError, ValueError, TypeError):
        return False
    return True


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


@contextmanager
def written_whole(checkpoint: Path, is_owner: bool) -> Iterator[None]:
    """Write a checkpoint inside the block, and remove it if the system refuses to write.

    Otherwise it could be taken for a whole one. `is_owner` says whether this process removes it.
    Raises `OSError` with the remedy. A checkpoint that is complete stays, whatever fails
    afterwards, such as an upload to the Hub.
    """
    if is_owner:
        (checkpoint / STATE_FILE).unlink(missing_ok=True)  # of an earlier checkpoint of this step
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_complete(checkpoint):
            raise
        if isinstance(error, RuntimeError):
            is_refused = any(word in str(error) for word in TORCH_CANNOT_WRITE)
            if not is_refused:
                raise
        if is_owner:
            shutil.rmtree(checkpoint, ignore_errors=True)
        raise OSError(
            f"The checkpoint {checkpoint} cannot be written, and was removed ({error}). Free space "
            "there or set another output_dir, then resume from the last checkpoint "
            "(resume_from_checkpoint=True)."
        ) from error


@contextmanager
def read_whole(checkpoint: Path) -> Iterator[None]:
    """Read a checkpoint inside the block. Raises `OSError` with the remedy if a file is damaged."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise
        raise OSError(
            f"The checkpoint {checkpoint} has a file that cannot be read ({type(error).__name__}: "
            f"{error}): resume from an earlier checkpoint."
        ) from error


def warn_of_new_optimizer(checkpoint: Path) -> None:
    """Warn if transformers finds no optimizer or schedule: it begins new ones silently."""
    missing = [
        name for name in (OPTIMIZER_NAME, SCHEDULER_NAME) if not (checkpoint / name).is_file()
    ]
    if missing:
        logger.warning(
            f"{checkpoint} has no {' and no '.join(missing)}, as with save_only_model=True: the "
            "run continues with a new optimizer, and with the learning rate of a run's beginning."
        )


def is_sharded(accelerator: Accelerator) -> bool:
    """Return whether the processes hold parts of a prepared model's parameters."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def load_policy(model: PreTrainedModel, checkpoint: Path) -> bool:
    """Load what transformers' loader would miss; return whether the policy is loaded.

    It would miss the adapter of a policy whose checkpoint has others beside it, and parameters that
    the checkpoint names or cuts differently. `model` must be whole in this process.
    """
    if is_peft_model(model):
        return _load_adapters(model, checkpoint)
    if not (checkpoint / "config.json").is_file() or not _is_converted(model):
        return False
    loaded = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())
    return True


def _load_adapters(model: PreTrainedModel, checkpoint: Path) -> bool:
    """Load each of a policy's adapters from where PEFT saves it, and no others."""
    found = dict(saved_adapters(model, checkpoint))
    active = model.active_adapters[0]
    if active not in found:
        return False
    for name, path in found.items():
        model.load_adapter(str(path), name, is_trainable=(name == active))
    model.set_adapter(active)
    return True


def saved_adapters(model: PreTrainedModel, checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and directories of those of a policy's adapters that a checkpoint holds.

    PEFT saves the one named `default` in the root.
    """
    for name in model.peft_config:
        directory = checkpoint if name == "default" else checkpoint / name
        if (directory / ADAPTER_FILE).is_file():
            yield name, directory


def _is_converted(model: PreTrainedModel) -> bool:
    """Return whether a checkpoint stores some parameter under another name, or in several parts."""
    layout = CheckpointForm(model, splits_experts=False).layout
    return any(list(stored) != [name] for name, stored in layout.items())


def check_loaded(
    what: str, model: PreTrainedModel, directory: Path, is_reader: bool = True
) -> None:
    """Raise `RuntimeError` unless a model's tensors are those that a directory holds, bit for bit.

    They are compared in the model's dtypes. A collective operation if the model is sharded.
    `is_reader` says whether this process reads the files.
    """
    held: NamedTensors
    if is_peft_model(model):
        from peft import get_peft_model_state_dict

        for name, path in saved_adapters(model, directory):
            state = get_peft_model_state_dict(model, adapter_name=name)
            held = ((key, gathered(tensor)) for key, tensor in state.items())
            saved = load_file(path / ADAPTER_FILE).items()
            _compare(f"{what}'s adapter {name!r}", held, saved, path, is_reader)
    elif any(directory.glob("*.safetensors")):
        held = CheckpointForm(model, splits_experts=False).convert(model_parameters(model))
        # Under FSDP2, transformers also writes the tied weights, which share another's tensor.
        tied = model.all_tied_weights_keys
        stored = (named for named in read_tensors(directory) if named[0] not in tied)
        _compare(what, held, stored, directory, is_reader)


def _compare(
    what: str, held: NamedTensors, stored: NamedTensors, path: Path, is_reader: bool
) -> None:
    digests = {}
    dtypes = {}
    for name, tensor in held:
        if is_reader:
            digests[name] = tensor_digest(tensor)
            dtypes[name] = tensor.dtype
    if not is_reader:
        return
    saved = {}
    for name, tensor in stored:
        dtype = dtypes.get(name, tensor.dtype)
        saved[name] = tensor_digest(tensor.to(dtype))
    clause = differences(saved, digests)
    if clause:
        raise RuntimeError(
            f"After resuming, the {what} does not hold what {path} holds: {clause}. Pass the model "
            "and the adapter that the run began with, or start a new run from the saved model."
        )
