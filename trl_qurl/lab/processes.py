"""Run commands in separate processes that do not outlive their parent.

    python -m trl_qurl.lab.processes COMMAND...

execs a command that will die with its parent.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from trl_qurl.cli.noise import quiet, shows_everything
from trl_qurl.signals import exits_on_signals

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl

ENGINE_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    # run the engine in this process, which dies with the command
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Default environment for processes that start an engine; the user's variables take precedence."""


class ChildFailure(ChildProcessError):
    """A failed command.

    `status` is its exit status, or the negative number of the signal that killed it.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def die_with_parent() -> None:
    """Ask the system to kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == 1:  # the parent has already died
            os._exit(1)


def main(command: list[str]) -> int:
    """Exec the command, which inherits the request to die with its parent."""
    die_with_parent()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"Cannot start {command[0]}: {error.strerror}.", file=sys.stderr)
        return 127


def run_child(
    command: Sequence[str | PathLike[str]],
    log: Path,
    meanwhile: Callable[[str], None] = lambda last_line: None,
    every: float = 60.0,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Run a command to completion in a separate process group, with its output in `log`.

    `meanwhile` is called with the last output line, every so many seconds and at the end. If the
    command fails, raises `ChildFailure` with its last output lines.
    """
    words = [os.fspath(word) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    # The wrapper makes the command die with this process: a restarted notebook kernel must not
    # leave an engine behind that occupies GPU memory.
    wrapped = [sys.executable, "-m", __name__, *words]
    variables = {**environment, "PYTHONUNBUFFERED": "1", "COLUMNS": "110"}
    with exits_on_signals():
        with log.open("wb") as output:
            process = subprocess.Popen(
                wrapped,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,
            )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(every)
                    break
                meanwhile(last_lines(log, 1))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            with suppress(ProcessLookupError):  # all processes of the group have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise ChildFailure(
            f"{' '.join(words)} failed with exit status {process.returncode}. Its output is in "
            f"{log}; the last lines:\n{last_lines(log, 25)}",
            process.returncode,
        )
    meanwhile(last_lines(log, 1))


def call_in_child(
    function: Callable[[Any], Any], argument: Any, failure: str, shows_output: bool = False
) -> Any:
    """Call a function of a module in a new process that may start an engine, and return its result.

    An engine's memory is freed only when its process ends. If the process fails, raises
    `ChildProcessError` with the message `failure`, and prints its last output lines to standard
    error, unless it `shows_output` as it runs.
    """
    with tempfile.TemporaryDirectory() as directory:
        command, result = call_command(function, argument, Path(directory))
        log = result.with_name("log")
        environment = ENGINE_ENVIRONMENT | os.environ
        try:
            if shows_output:
                subprocess.run(command, env=environment, check=True)
            else:
                run_child(command, log, environment=environment)
        except (ChildProcessError, subprocess.CalledProcessError) as error:
            if log.exists():
                print(last_lines(log, 25), file=sys.stderr)
            raise ChildProcessError(failure) from error
        return pickle.loads(result.read_bytes())


def call_command(
    function: Callable[[Any], Any], argument: Any, directory: Path
) -> tuple[list[str], Path]:
    """Return the command that calls a function of a module, and the file for its pickled result."""
    call = directory / "call"
    result = directory / "result"
    call.write_bytes(pickle.dumps((function, argument)))
    code = f"from {__name__} import answer_call; answer_call()"
    return [sys.executable, "-c", code, str(call), str(result)], result


def answer_call() -> None:
    """Make the call that `call_command` wrote to one file, and write its result to another."""
    die_with_parent()
    quiet()
    call, result = sys.argv[1:]
    function, argument = pickle.loads(Path(call).read_bytes())
    try:
        Path(result).write_bytes(pickle.dumps(function(argument)))
    except (ValueError, OSError) as error:  # errors that a user can fix, as in `trl_qurl.cli.main`
        if shows_everything():
            raise
        sys.exit(f"trl-qurl: error: {' '.join(str(error).split())}")


def last_lines(log: Path, count: int) -> str:
    """Return the last nonempty lines of a file, as they would appear in a terminal."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        text = file.read().decode("utf-8", errors="replace")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)  # escape sequences
    # Progress bars overwrite their line; keep only the last version.
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    nonempty = [line for line in lines if line]
    return "\n".join(nonempty[-count:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
