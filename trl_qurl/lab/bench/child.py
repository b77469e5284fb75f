"""A process that takes a step of `trial` whenever it is asked to."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from trl_qurl.cli.noise import quiet
from trl_qurl.lab.bench.plan import Job
from trl_qurl.lab.bench.verdict import Step
from trl_qurl.lab.processes import (
    ENGINE_ENVIRONMENT,
    LAUNCHERS_VARIABLES,
    die_with_parent,
    last_lines,
)

LOG = "log"
PATIENCE = 20.0  # seconds for the end of a process


class Child:
    """A process that runs `train` or `generate` of `trial`, for a step whenever it is asked."""

    def __init__(self, function: str, job: Job) -> None:
        self._directory = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        arguments = (function, job, self._directory.name, pipe)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        pipe.close()

    def step(self) -> Step:
        """Return a step; raise `ChildProcessError` with the last output if the process ended."""
        try:
            self._pipe.send(None)
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            log = last_lines(Path(self._directory.name, LOG), 15)
            raise ChildProcessError(
                f"It ended with status {self._process.exitcode}\n{log}"
            ) from None

    def stop(self) -> None:
        """End the process, and delete its files."""
        self._pipe.close()  # what it waits for: a process that is killed leaves semaphores behind
        self._process.join(PATIENCE)
        self._process.kill()
        self._process.join()
        self._directory.cleanup()


def _serve(function: str, job: Job, directory: str, pipe: Connection) -> None:
    die_with_parent()
    with Path(directory, LOG).open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(ENGINE_ENVIRONMENT | os.environ)
    for name in LAUNCHERS_VARIABLES:
        os.environ.pop(name, None)
    quiet()
    # Seconds of imports, after the output has its place: Ctrl-C reaches this process, too.
    from trl_qurl.lab.bench import trial

    with suppress(EOFError):  # nobody asks for steps any more
        getattr(trial, function)(job, directory, pipe)
