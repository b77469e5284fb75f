"""The run log, `run.jsonl` in the output directory: one line of settings, then one line per logged row.

`trl-qurl report` reads it. A killed run loses only the line it was writing.
"""

import gzip
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

RUN_LOG = "run.jsonl"

# Text of settings with secret values, also inside JSON text, where quotes are escaped; and passwords in URLs.
_SECRET = re.compile(
    r"""((?:token|api_?key|password|passwd|secret|authorization|credentials?)\\*":\s*\\*")[^"\\]+""", re.IGNORECASE
)
_PASSWORD = re.compile(r'(?<=:)//[^/@\s"]+@')


@dataclass(frozen=True)
class Run:
    """The contents of a run log."""

    path: Path  # of the log
    settings: dict[str, Any]  # of the run, by name
    rows: list[dict[str, Any]]  # in the order they were written, each with its `step`

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return the values of a metric over the run.

        Args:
            name: Name under which the metric was logged, such as `mismatch/kl_k3`.

        Returns:
            `(step, value)` for every step with a finite value; the last value if a step has several.
        """
        values = {row["step"]: row[name] for row in self.rows if isinstance(row.get(name), int | float)}
        return sorted(values.items())


def begin_log(path: Path, settings: dict[str, Any], history: Sequence[dict[str, Any]] = ()) -> None:
    """Start a run's log: a new run's, or that of a run that resumes.

    A new run renames an earlier run's file to the next free `run-1.jsonl`. A resumed run writes its file again with
    the rows of its checkpoint, because the steps after it will be repeated.

    Args:
        path: The log file.
        settings: The run's settings. Values that JSON cannot represent become text; secrets are masked.
        history: Rows that the checkpoint holds (`TrainerState.log_history`).
    """
    if path.exists() and not history:
        backups = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
        path.rename(next(backup for backup in backups if not backup.exists()))
    path.parent.mkdir(parents=True, exist_ok=True)
    header = _PASSWORD.sub("//<hidden>@", _SECRET.sub(r"\1<hidden>", _line({"settings": settings})))
    tmp = path.with_suffix(".tmp")
    tmp.write_text(header + "".join(map(_line, history)), encoding="utf-8")
    tmp.replace(path)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a run's log.

    Args:
        path: The log file.
        row: Values by name, including `step`.
    """
    with open(path, "a", encoding="utf-8") as file:
        file.write(_line(row))


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the log of a run.

    Args:
        path: The run's output directory or its log file, which may be gzipped.

    Returns:
        The run's settings and rows, without an incomplete last line left by a killed run.

    Raises:
        FileNotFoundError: The log does not exist.
        ValueError: The file is not a run log, or is damaged.
    """
    file = Path(path, RUN_LOG) if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"The run log {file} does not exist: pass the output_dir of a run, or its {RUN_LOG}.")
    open_file = gzip.open if file.suffix == ".gz" else open
    try:
        with open_file(file, "rt", encoding="utf-8") as stream:
            *lines, _ = stream.read().split("\n")  # what follows the last newline is incomplete
        header, *rows = map(json.loads, lines)
        if not all(isinstance(row["step"], int) for row in rows):
            raise ValueError("a step is not a whole number")
        return Run(file, header["settings"], rows)
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        shape = "its first line must hold the settings, and all others a step"
        raise ValueError(f"{file} is not a run log, or is damaged ({error}): {shape}.") from error


def _line(content: dict[str, Any]) -> str:
    """Return a line of JSON, with `null` for numbers that JSON cannot represent, such as NaN."""
    numbers = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    return json.dumps(numbers) + "\n"
