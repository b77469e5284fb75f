"""Read the logs of runs, which `trl_qurl.trainers.run_log` writes."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_qurl.trainers.run_log import RUN_LOG


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
            `(step, value)` for every step with a finite value; the last value if a step has
            several.
        """
        values = {
            row["step"]: row[name] for row in self.rows if isinstance(row.get(name), int | float)
        }
        return sorted(values.items())


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
        raise FileNotFoundError(
            f"The run log {file} does not exist: pass the output_dir of a run, or its {RUN_LOG}."
        )
    open_file = gzip.open if file.suffix == ".gz" else open
    try:
        with open_file(file, "rt", encoding="utf-8") as stream:
            *lines, _ = stream.read().split("\n")  # what follows the last newline is incomplete
        header, *rows = map(json.loads, lines)
        if not all(isinstance(row["step"], int) for row in rows):
            raise ValueError("a step is not a whole number")
        return Run(file, header["settings"], rows)
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file} is not a run log, or is damaged: its first line must hold the settings, and "
            "all others a step."
        ) from error
