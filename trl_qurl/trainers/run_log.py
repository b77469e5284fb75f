"""The run log, `run.jsonl` in the output directory: one line of settings, then one line per logged row.

A killed run loses only the line it was writing. `trl_qurl.lab.runs` reads the log.
"""

import json
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

RUN_LOG = "run.jsonl"

# Text of settings with secret values, also inside JSON text, where quotes are escaped; and passwords in URLs.
_SECRET = re.compile(
    r"""((?:token|api_?key|password|passwd|secret|authorization|credentials?)\\*":\s*\\*")[^"\\]+""", re.IGNORECASE
)
_PASSWORD = re.compile(r'(?<=:)//[^/@\s"]+@')


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


def _line(content: dict[str, Any]) -> str:
    """Return a line of JSON, with `null` for numbers that JSON cannot represent, such as NaN."""
    return json.dumps(json.loads(json.dumps(content, default=str), parse_constant=lambda name: None)) + "\n"
