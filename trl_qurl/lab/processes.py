"""Run commands in separate processes that do not outlive their parent.

    python -m trl_qurl.lab.processes COMMAND...

execs a command that will die with its parent.
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from trl_qurl.cli.noise import quiet, shows_everything
from trl_qurl.signals import exits_on_signals

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl
LOG_LINES = 25  # last lines to keep of a failed command's output

Argument = TypeVar("Argument")
Answer = TypeVar("Answer")

ENGINE_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    # run the engine in this process, which dies with the command
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Default environment for processes that start an engine; the user's variables take precedence."""

LAUNCHERS_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What no child inherits: several run side by side, and each is a run of one process."""


class ChildFailure(ChildProcessError):
    """A command that failed, or took too long.

    `status` is its exit status, or the negative number of the signal that killed it; `fault` says
    how it ended, and `output` has its last lines.
    """

    def __init__(self, message: str, status: int, fault: str, output: str) -> None:
        super().__init__(message)
        self.status = status
        self.fault = fault
        self.output = output


def name_of_command() -> str:
    """Return what starts `trl-qurl` in the user's next shell, in the same directory.

    That shell need not have this environment on its `PATH`.
    """
    script = Path(sys.executable).with_name("trl-qurl")
    if shutil.which("trl-qurl") or not script.exists():
        return "trl-qurl"
    return os.path.relpath(script)


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
    log: Path | None,
    meanwhile: Callable[[str], None] = lambda last_line: None,
    every: float = 60.0,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Run a command to completion in a separate process group.

    Its output goes to `log`, or, with `None`, where this process's goes. `meanwhile` is called with
    the last line of the log, every so many seconds and at the end. If the command fails, raises
    `ChildFailure` with its last output lines.
    """
    words = [os.fspath(word) for word in command]
    # The wrapper makes the command die with this process: a restarted notebook kernel must not
    # leave an engine behind that occupies GPU memory.
    wrapped = [sys.executable, "-m", __name__, *words]
    inherited = {
        name: value for name, value in environment.items() if name not in LAUNCHERS_VARIABLES
    }
    variables = {**inherited, "PYTHONUNBUFFERED": "1"}
    with ExitStack() as stack:
        stack.enter_context(exits_on_signals())
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log.open("wb"))
            variables["COLUMNS"] = "110"
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
    status = process.returncode
    if status:
        fault = f"exited with status {status}"
        if status < 0:
            fault = f"was killed by {signal.Signals(-status).name}"
        tail = last_lines(log, LOG_LINES)
        message = f"{' '.join(words)} {fault}. Its output is in {log}; the last lines:\n{tail}"
        raise ChildFailure(message, status, fault, tail)
    meanwhile(last_lines(log, 1))


def call_in_child(
    function: Callable[[Argument], Answer],
    argument: Argument,
    failure: str = "",
    shows_output: bool = False,
    seconds: float = math.inf,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Answer:
    """Call a function of a module in a new process that may start an engine, and return its result.

    An engine's memory is freed only when its process ends. If the process fails, or takes more than
    these seconds, raises `ChildFailure`; with a message `failure`, the last output lines go to
    standard error first, unless the process `shows_output` as it runs. `environment` is in addition
    to this process's.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        call = Path(directory, "call")
        result = Path(directory, "result")
        log = None if shows_output else Path(directory, "log")
        call.write_bytes(pickle.dumps((function, argument)))

        def watch(last_line: str) -> None:
            if time.monotonic() > deadline:
                fault = f"did not finish within {seconds:.0f} s"
                raise ChildFailure(failure, 0, fault, last_lines(log, LOG_LINES))

        code = f"from {__name__} import answer_call; answer_call()"
        command: list[str | Path] = [sys.executable, "-c", code, call, result]
        variables = {**ENGINE_ENVIRONMENT, **os.environ, **environment}
        try:
            run_child(command, log, watch, 0.3, variables)
        except ChildFailure as error:
            if not result.exists():  # else an engine failed when it was stopped
                if failure:
                    print(error.output, file=sys.stderr)
                raise ChildFailure(failure, error.status, error.fault, error.output) from error
        return pickle.loads(result.read_bytes())


def answer_call() -> None:
    """Make the call that `call_in_child` wrote to one file, and write its result to another."""
    quiet()
    call, result = map(Path, sys.argv[1:])
    function, argument = pickle.loads(call.read_bytes())
    try:
        answer = function(argument)
    except (ValueError, OSError) as error:  # errors that a user can fix, as in `trl_qurl.cli.main`
        if shows_everything():
            raise
        sys.exit(f"trl-qurl: error: {' '.join(str(error).split())}")
    result.write_bytes(pickle.dumps(answer))


def last_lines(log: Path | None, count: int) -> str:
    """Return the last nonempty lines of a file, if there is one, as a terminal would show them."""
    if log is None:
        return ""
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
