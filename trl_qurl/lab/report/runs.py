"""The runs of a report, read before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trl_qurl.trainers.run_log import Run, read_run


def load_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read the runs that have rows.

    Args:
        paths: directories or files, as `read_run` takes them.

    Returns:
        The runs in the order given, each file once, and notes on what was left out.

    Raises:
        ValueError: no path was given, a file is not a run log, or no run has any row.
        FileNotFoundError: a run has no log.
    """
    if not paths:
        raise ValueError("No run was given: name the output_dir of at least one run, or its run.jsonl.")
    runs: dict[Path, Run] = {}
    notes = []
    for path in paths:
        run = read_run(path)
        if run.path.resolve() in runs:
            notes.append(f"{path} was given more than once and is counted once.")
        elif run.rows:
            runs[run.path.resolve()] = run
        else:
            notes.append(f"{path} is left out: it has logged nothing yet.")
    if not runs:
        raise ValueError(
            f"None of the runs given ({', '.join(map(str, paths))}) has logged anything: a run writes its first row "
            "after logging_steps optimizer updates, so wait for it, or name runs that got further."
        )
    return list(runs.values()), notes
