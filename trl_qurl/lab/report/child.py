"""A command in a process group of its own, whose output goes to a file; it does not outlive whoever waits for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path

SHOWN_LINES = 25
"""Of a command that failed."""

TAIL_BYTES = 20_000

PATIENCE = 10.0
"""Seconds that a command gets to end by itself."""

ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_child(
    command: Sequence[str | PathLike[str]], log: Path, meanwhile: Callable[[str], None], every: float
) -> None:
    """Run a command to its end.

    Args:
        command: program and arguments.
        log: file for what it prints, made anew.
        meanwhile: called every so often with the last line that was printed.
        every: seconds between two calls.

    Raises:
        ChildProcessError: it failed, or is no program; the message ends with the last lines that it printed.
    """
    words = [os.fspath(word) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    # The first Python of this line becomes the command, and dies with this process: a kernel that is restarted must
    # not leave an engine behind that holds the GPU's memory.
    wrapped = [sys.executable, "-m", "trl_qurl.lab.lifetime", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "110"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            wrapped, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        while True:
            try:
                process.wait(every)
                break
            except subprocess.TimeoutExpired:
                meanwhile(last_lines(log, 1))
    finally:
        end_group(process)
    if process.returncode:
        raise ChildProcessError(
            f"{' '.join(words)} ended with exit status {process.returncode}. All it printed is in {log}; its last "
            f"lines:\n{last_lines(log, SHOWN_LINES)}"
        )


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group, and whatever is left of the group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    with suppress(ProcessLookupError):  # there is nobody left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: Path, count: int) -> str:
    """The last lines of a file that say something, as a terminal would leave them."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    # A progress bar writes over its line again and again.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in ESCAPE_SEQUENCE.sub("", text).split("\n")]
    return "\n".join([line.rstrip() for line in lines if line.strip()][-count:])
