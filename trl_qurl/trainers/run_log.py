"""The run log, `run.jsonl` in the output directory: a line of settings, then a line per row.

A killed run loses only the line it was writing, and a full disk only the rows it has no room for.
`trl_qurl.lab.runs` reads the log. Its mode is that of the other files in the directory, which users
share and publish on purpose, so it holds numbers, and text only of the settings in `TEXTS`.
"""

import fcntl
import functools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from trl_qurl.quantization.files import lock, write_atomically

logger = logging.getLogger(__name__)

RUN_LOG = "run.jsonl"
TEXTS = frozenset(
    (
        "model",
        "algorithm",
        "model_runner",
        "rollout_quantization",
        "quantization_ignore",
        "weight_sync",
        "mismatch_guard",
        "objective",
        "vllm_mode",
        "vllm_importance_sampling_mode",
        "loss_type",
        "importance_sampling_level",
        "scale_rewards",
        "multi_objective_aggregation",
        "optim",
        "lr_scheduler_type",
    )
)
"""Settings whose text is logged. Any other text may hold a secret."""

_locks: dict[Path, int] = {}  # open directories of this process's runs, by path of the log


def begin_log(
    path: Path, settings: Mapping[str, object], history: Sequence[Mapping[str, object]] = ()
) -> None:
    """Start the log of a run that is new or resumes. No other may write there until `end_log`.

    A new run renames an earlier run's file to the next free `run-1.jsonl`. A resumed run writes its
    file again with the rows of its checkpoint, because the steps after it will be repeated.

    Args:
        path: The log file.
        settings: The run's settings. Only numbers, True, False and None are kept, and `TEXTS`.
        history: Rows that the checkpoint holds (`TrainerState.log_history`).

    Raises:
        RuntimeError: Another run is training with this output directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _locks[path] = _lock(path.parent, fcntl.LOCK_EX)
    try:
        _write_log(path, settings, history)
    except OSError:
        end_log(path)
        raise


def _write_log(
    path: Path, settings: Mapping[str, object], history: Sequence[Mapping[str, object]]
) -> None:
    if path.exists() and not history:
        path.rename(_free_name(path))
    kept = {name: value for name, value in settings.items() if name in TEXTS} | _numbers(settings)
    lines = [_line({"settings": kept})]
    lines += [_line(_numbers(row)) for row in history]
    text = "".join(lines)
    write_atomically(path, lambda tmp: tmp.write_text(text, encoding="utf-8"))


def _free_name(path: Path) -> Path:
    number = 1
    while True:
        backup = path.with_name(f"{path.stem}-{number}{path.suffix}")
        if not backup.exists():
            return backup
        number += 1


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Append a row to a run's log.

    If it cannot be written, as on a full disk, the row is lost: warn once.

    Args:
        path: The log file.
        row: Values by name, including `step`. Only numbers are kept.
    """
    try:
        with open(path, "rb+") as file:
            file.seek(_end_of_rows(file))
            file.truncate()
            file.write(_line(_numbers(row)).encode())
    except OSError as error:
        _warn_of_lost_rows(path, error.strerror)


def end_log(path: Path) -> None:
    """Let other runs use the output directory, if this process began the log.

    Args:
        path: The log file.
    """
    if path in _locks:
        os.close(_locks.pop(path))


def check_unused(directory: Path) -> None:
    """Check an output directory before the slow start of a run.

    Args:
        directory: The output directory, which may not exist yet.

    Raises:
        RuntimeError: Another run is training with it.
    """
    if directory.is_dir():
        os.close(_lock(directory, fcntl.LOCK_SH))


def _lock(directory: Path, kind: int) -> int:
    """Lock an output directory and return it, open.

    A lock of the directory itself leaves no file behind, but other machines that mount it do not
    see the lock.
    """
    try:
        return lock(directory, kind)
    except BlockingIOError:
        raise RuntimeError(
            f"Another run is training with the output directory {directory}, and both would write "
            f"to its {RUN_LOG} and its checkpoints: set another output_dir, or stop that run first."
        ) from None
    except OSError:
        return os.open(directory, os.O_RDONLY)  # a file system without locks


def _forget_locks() -> None:
    """Close a forked process's copies of the locks, which a worker may hold longer than the run."""
    for path in list(_locks):
        end_log(path)


os.register_at_fork(after_in_child=_forget_locks)


def _end_of_rows(file: BinaryIO) -> int:
    """Return where the last complete line ends. The rest is of a row that was cut short."""
    file.seek(-1, os.SEEK_END)
    if file.read() == b"\n":
        return file.tell()
    file.seek(0)
    return file.read().rfind(b"\n") + 1


@functools.cache
def _warn_of_lost_rows(path: Path, reason: str) -> None:
    logger.warning(
        "Rows are missing from %s, which cannot be written (%s). Training continues, and rows are "
        "logged again once they can be; free space, or check the permissions.",
        path,
        reason,
    )


def _numbers(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that are numbers, True, False or None."""
    return {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, int | float)
    }


def _line(content: Mapping[str, object]) -> str:
    """Return a line of JSON, with `None` for numbers that it cannot represent, such as NaN."""
    data = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return json.dumps(data) + "\n"
