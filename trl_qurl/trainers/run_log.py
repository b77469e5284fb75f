"""The run log, `run.jsonl` in the output directory: one line of settings, then one line per logged row.

`trl-qurl report` reads it. Every run writes one, regardless of other loggers. It grows line by line, so a killed run
loses only the line it was writing.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

RUN_LOG = "run.jsonl"
SETTINGS_KEY = "settings"

# Names of settings with secret values; `max_tokens` and `eos_token_id` do not match.
_SECRET = re.compile(r"(^|_|-)(token|api_?key|password|passwd|secret|authorization|credentials?)$", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=:)//[^/@\s]+@")  # user and password in a URL
_MASK = "<hidden>"

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The contents of a run log.

    Attributes:
        path: The log file.
        settings: The run's settings, by name.
        rows: The logged rows in the order they were written, each with its `step`.
    """

    path: Path
    settings: dict[str, Any]
    rows: list[Row]

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return the values of a metric over the run.

        Args:
            name: Name under which the metric was logged, such as `mismatch/kl_k3`.

        Returns:
            `(step, value)` for every step with a finite value; the last value if a step has several.
        """
        values = {row["step"]: row[name] for row in self.rows if isinstance(row.get(name), int | float)}
        return sorted(values.items())


class RunLog:
    """Writer of one run's log.

    Args:
        path: The log file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def begin(self, settings: dict[str, Any], step: int) -> None:
        """Start the file, or continue it after a resume.

        A run that starts at step 0 renames an earlier run's file to the next free `run-1.jsonl`. A resumed run keeps
        the rows up to its checkpoint and drops later ones, whose steps will be repeated.

        Args:
            settings: The run's settings. Values that JSON cannot represent become text; secrets are masked.
            step: Number of optimizer updates already done.
        """
        rows: list[Row] = []
        if step > 0 and self.path.exists():
            rows = [row for row in read_run(self.path).rows if row["step"] <= step]
        elif self.path.exists():
            backups = (self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}") for number in count(1))
            os.replace(self.path, next(backup for backup in backups if not backup.exists()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tmp = self.path.with_suffix(".tmp")
        contents = [{SETTINGS_KEY: _without_secrets(settings)}, *rows]
        tmp.write_text("".join(map(_line, contents)), encoding="utf-8")
        os.replace(tmp, self.path)

    def append(self, row: Row) -> None:
        """Append one row.

        Args:
            row: Values by name, including `step`.
        """
        with open(self.path, "a", encoding="utf-8") as file:
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
    file = Path(path)
    if file.is_dir():
        file /= RUN_LOG
    if not file.is_file():
        raise FileNotFoundError(f"The run log {file} does not exist: pass the output_dir of a run, or its {RUN_LOG}.")
    open_file = gzip.open if file.suffix == ".gz" else open
    try:
        with open_file(file, "rt", encoding="utf-8") as stream:
            *lines, _ = stream.read().split("\n")  # what follows the last newline is incomplete
        header, *rows = map(json.loads, lines)
        if not all(isinstance(row["step"], int) for row in rows):
            raise ValueError("a step is not a whole number")
        return Run(file, header[SETTINGS_KEY], rows)
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file} is not a run log, or is damaged ({error}): its first line must hold the settings, and all others "
            "a step."
        ) from error


def _without_secrets(value: Any) -> Any:
    """Mask secrets in nested settings, including those in JSON text, and passwords in URLs."""
    if isinstance(value, dict):
        return {
            name: _MASK if isinstance(entry, str) and _SECRET.search(str(name)) else _without_secrets(entry)
            for name, entry in value.items()
        }
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        with suppress(json.JSONDecodeError):
            return json.dumps(_without_secrets(json.loads(value)))
    return _CREDENTIALS.sub(f"//{_MASK}@", value)


def _line(content: dict[str, Any]) -> str:
    """Return a line of JSON, with `null` for numbers that JSON cannot represent, such as NaN."""
    numbers = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    return json.dumps(numbers) + "\n"
