"""Checks of a resume: is the checkpoint complete, and did the run load what was saved?

transformers looks for the last checkpoint by its name, complete or not. It loads the adapters of
subdirectories, such as TRL's `ref/` and our `critic/`, instead of the policy's own; and where a
model's parameters have other names or shapes than its checkpoint's tensors, as experts do, it
leaves them as they are and logs their names.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl_qurl.quantization.checkpoint_form import CheckpointForm, NamedTensors
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.storage import read_tensors
from trl_qurl.rollout.checks.tensors import differences, tensor_digest
from trl_qurl.rollout.group import TOGETHER
from trl_qurl.trainers.resuming import ADAPTER_FILE, is_sharded, saved_adapters

logger = get_logger(__name__)  # logs in the main process only

STATE_FILE = "trainer_state.json"  # transformers writes it last


def complete_checkpoint(given: str | Path | bool | None, output_dir: str | Path) -> Path | None:
    """Return the checkpoint to resume from: the given one, or for `True` a run's last complete one.

    Raises:
        FileNotFoundError: The given one is incomplete, or not there.
        ValueError: The run has no complete one, as in transformers.
    """
    if given is True:
        return last_complete_checkpoint(output_dir)
    if not given:
        return None
    checkpoint = Path(given)
    if not is_complete(checkpoint):
        raise FileNotFoundError(
            f"{checkpoint} is not there, or no complete checkpoint ({STATE_FILE} is missing or cut "
            "short), as after a full disk or a kill: pass an earlier one, or "
            "resume_from_checkpoint=True for the last complete one."
        )
    return checkpoint


def last_complete_checkpoint(output_dir: str | Path) -> Path:
    """Return the newest complete checkpoint of a run; raise `ValueError` if it has none."""
    numbers = {}  # of steps, by checkpoint
    incomplete = []
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.rpartition("-")[2]
        if not is_complete(path):
            incomplete.append(path.name)
        elif number.isdecimal():
            numbers[path] = int(number)
    names = ", ".join(sorted(incomplete)) or "none"
    if not numbers:
        raise ValueError(
            f"resume_from_checkpoint=True looks for a checkpoint in {output_dir} (output_dir), but "
            f"there is no complete one (incomplete: {names}): pass the path of a checkpoint, or "
            "leave resume_from_checkpoint out to begin a new run."
        )
    last = max(numbers, key=lambda path: numbers[path])
    if incomplete:
        logger.warning(
            f"Resuming from {last}. Incomplete, as after a full disk or a kill: {names}."
        )
    return last


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint was written to its end."""
    try:
        json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def reading(checkpoint: object) -> Iterator[None]:
    """Name the checkpoint in errors of libraries about its files, which may be damaged."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"{checkpoint} was being loaded: if it is damaged, resume from an earlier checkpoint."
        )
        raise


def check_resumed(trainer: Any, checkpoint: Path) -> None:
    """Check what transformers has loaded from a checkpoint. A collective operation.

    Warns if transformers has found no optimizer or schedule: it begins new ones silently. Raises as
    `check_policy`.
    """
    if not is_sharded(trainer.accelerator):  # else it has other files
        names = (OPTIMIZER_NAME, SCHEDULER_NAME)
        missing = [name for name in names if not (checkpoint / name).is_file()]
        if missing:
            logger.warning(
                f"{checkpoint} has no {' and no '.join(missing)}, as with save_only_model=True: "
                "the run continues with a new optimizer, and with the learning rate of a run's "
                "beginning."
            )
    check_policy(trainer, checkpoint)


def check_policy(trainer: Any, checkpoint: Path) -> None:
    """Raise `RuntimeError` unless the policy is the checkpoint's. A collective operation.

    Under FSDP and DeepSpeed, launchers load it from files of their own.
    """
    if is_sharded(trainer.accelerator):
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    TOGETHER.run(lambda: check_loaded("policy", policy, checkpoint))


def check_loaded(what: str, model: PreTrainedModel, directory: Path) -> None:
    """Raise `RuntimeError` unless a model's tensors are those that a directory holds, bit for bit.

    They are compared in the model's dtypes.
    """
    if is_peft_model(model):
        from peft import get_peft_model_state_dict

        for name, path in saved_adapters(model, directory):
            held = get_peft_model_state_dict(model, adapter_name=name).items()
            stored = load_file(path / ADAPTER_FILE).items()
            _compare(f"{what}'s adapter {name!r}", held, stored, path)
    elif any(directory.glob("*.safetensors")):
        held = CheckpointForm(model, splits_experts=False).convert(model_parameters(model))
        _compare(what, held, read_tensors(directory), directory)


def _compare(what: str, held: NamedTensors, stored: NamedTensors, path: Path) -> None:
    digests = {}
    dtypes = {}
    for name, tensor in held:
        digests[name] = tensor_digest(tensor)
        dtypes[name] = tensor.dtype
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
