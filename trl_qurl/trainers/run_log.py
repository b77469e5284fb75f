"""A run as one file, `run.jsonl` in its output directory: the settings first, then every row that was logged.

`trl-qurl report` reads it. It exists after every run, whatever else the trainer logs to, and grows line by line, so
that a run that is killed loses only the line it was writing.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

RUN_LOG = "run.jsonl"
SETTINGS_KEY = "settings"

# Names of settings whose text is secret; `max_tokens` and `eos_token_id` are not among them.
_SECRET = re.compile(r"(^|_|-)(token|api_?key|password|passwd|secret|authorization|credentials?)$", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=:)//[^/@\s]+@")  # user and password in an address
_MASK = "<hidden>"

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a run log holds.

    Attributes:
        path: The file.
        settings: What the run was asked to do, by name.
        rows: What it logged, in the order it was written, each with its `step`.
    """

    path: Path
    settings: dict[str, Any]
    rows: list[Row]

    def series(self, name: str) -> list[tuple[int, float]]:
        """A metric over the run.

        Args:
            name: As it was logged, such as `mismatch/kl_k3`.

        Returns:
            `(step, value)` wherever it has a finite value; the last one where a step has several.
        """
        values = {row["step"]: row[name] for row in self.rows if isinstance(row.get(name), int | float)}
        return sorted(values.items())


class RunLog:
    """Writes the log of one run.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def begin(self, settings: dict[str, Any], step: int) -> None:
        """Start the file, or continue it.

        A run that starts at step 0 renames the file of an earlier run to the next free `run-1.jsonl`. A resumed one
        keeps the rows up to its checkpoint and drops the later ones, whose steps are made again.

        Args:
            settings: What the run was asked to do. What JSON cannot hold becomes text; secrets are not written.
            step: Optimizer updates already made.
        """
        kept: list[Row] = []
        if step > 0 and self.path.exists():
            kept = [row for row in read_run(self.path).rows if row["step"] <= step]
        elif self.path.exists():
            places = (self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}") for number in count(1))
            os.replace(self.path, next(place for place in places if not place.exists()))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        contents = [{SETTINGS_KEY: _without_secrets(settings)}, *kept]
        draft.write_text("".join(map(_line, contents)), encoding="utf-8")
        os.replace(draft, self.path)

    def append(self, row: Row) -> None:
        """Add one row.

        Args:
            row: Values by name, `step` among them.
        """
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(_line(row))


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the log of a run.

    Args:
        path: The run's output directory, or the file itself, which may be gzipped.

    Returns:
        Its settings and rows.

    Raises:
        FileNotFoundError: There is no log.
        ValueError: The file is not one, or is gzipped and damaged. A half-written last line, of a run that was
            killed, is left out.
    """
    file = Path(path)
    if file.is_dir():
        packed = file / f"{RUN_LOG}.gz"
        file = packed if packed.is_file() and not (file / RUN_LOG).is_file() else file / RUN_LOG
    if not file.is_file():
        raise FileNotFoundError(f"There is no run log {file}: give the output_dir of a run, or its {RUN_LOG}.")
    contents = _read_lines(file)
    first, rows = (contents or [{}])[0], contents[1:]
    if set(first) != {SETTINGS_KEY} or not all(isinstance(row.get("step"), int) for row in rows):
        raise ValueError(f"{file} is not a run log: its first line holds the settings, and all others have a step.")
    return Run(file, first[SETTINGS_KEY], rows)


def _read_lines(file: Path) -> list[dict[str, Any]]:
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8") as stream:
            lines = stream.read().splitlines(keepends=True)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as a run log: {error}.") from error
    contents = []
    for number, line in enumerate(lines, start=1):
        try:
            contents.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # the run was killed while it wrote this line
            raise ValueError(f"Line {number} of {file} is not JSON: {error}.") from error
        if not isinstance(contents[-1], dict):
            raise ValueError(f"Line {number} of {file} is a JSON {type(contents[-1]).__name__}, not a row.")
    return contents


def _without_secrets(value: Any) -> Any:
    """Hide texts under the name of a secret, in nested settings and in JSON text too, and passwords in addresses."""
    if isinstance(value, dict):
        return {
            name: _MASK if isinstance(entry, str) and _SECRET.search(str(name)) else _without_secrets(entry)
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_secrets(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        with suppress(json.JSONDecodeError):
            return json.dumps(_without_secrets(json.loads(value)))
    return _CREDENTIALS.sub(f"//{_MASK}@", value)


def _line(content: dict[str, Any]) -> str:
    """A line of JSON, with `null` for numbers that JSON does not have, such as NaN."""
    numbers = json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)
    return json.dumps(numbers) + "\n"
