"""
Scripts in processes forked off one that has imported TRL and vLLM.

A fresh Python takes about ten seconds of processor time to import them, more than most scenarios run for; with a
server of forks (`multiprocessing`'s) each of the tests' workers pays once.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

PRELOADED = [
    "trl.trainer.grpo_trainer",
    "vllm.entrypoints.llm",
    "peft",
    "trl_qurl.trainers.grpo",
    "trl_qurl.trainers.ppo",
]


class Finished(NamedTuple):
    """What one process printed, and how it ended."""

    status: int
    stdout: str
    stderr: str


class Forks:
    """
    Args:
        environment: Variables of every process; modules read some of them while they are imported.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        with replaced_environment(environment):
            forkserver.ensure_running()

    def run(
        self, script: Path, arguments: list[str], environments: list[dict[str, str]], directory: Path, timeout: float
    ) -> list[Finished]:
        """
        Run a script as `python SCRIPT ARGUMENTS` does, once for each environment, all at the same time.

        Args:
            directory: Empty; for what the processes print.
            timeout: Seconds until they are killed.

        Raises:
            subprocess.TimeoutExpired: If they were.
        """
        outputs = [(directory / f"{rank}.out", directory / f"{rank}.err") for rank in range(len(environments))]
        processes = [
            self._context.Process(target=be_script, args=(script, arguments, environment, *paths))
            for environment, paths in zip(environments, outputs, strict=True)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(timeout)
                if process.exitcode is None:
                    raise subprocess.TimeoutExpired(str(script), timeout, outputs[0][0].read_bytes())
        finally:
            for process in processes:
                if process.is_alive():
                    os.killpg(process.pid, signal.SIGKILL)
        return [
            Finished(process.exitcode, *(path.read_text(errors="replace") for path in paths))
            for process, paths in zip(processes, outputs, strict=True)
        ]


def be_script(script: Path, arguments: list[str], environment: dict[str, str], stdout: Path, stderr: Path) -> None:
    """Become the process that `python SCRIPT ARGUMENTS` would be."""
    os.setsid()  # what it starts is killed with it
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        with path.open("wb") as output:
            os.dup2(output.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing's children end without: temporary directories would be left


@contextmanager
def replaced_environment(environment: dict[str, str]) -> Iterator[None]:
    """`environment` instead of this process's variables."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
