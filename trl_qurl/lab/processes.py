"""Commands that run in processes of their own and do not outlive whoever started them.

    python -m trl_qurl.lab.processes COMMAND...

execs any command, which then dies with its parent.
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

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux' prctl

ENGINE_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine dies with its process, and that with the command
}
"""Environment of a process that starts an engine, where the user has not set it otherwise."""


class ChildFailure(ChildProcessError):
    """A command that failed; `status` is its exit status, or the negative number of the signal that ended it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def die_with_parent() -> None:
    """Ask the system to kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == 1:  # the parent was killed before this line
            os._exit(1)


def main(command: list[str]) -> int:
    """Exec the command; the request to the system stays in force."""
    die_with_parent()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}.", file=sys.stderr)
        return 127


def run_child(
    command: Sequence[str | PathLike[str]],
    log: Path,
    meanwhile: Callable[[str], None] = lambda printed: None,
    every: float = 60.0,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Run a command to its end, in a process group of its own, with its output in a file, which is replaced.

    While it runs, `meanwhile` is called every so many seconds, with the last line that was printed. A command that
    fails raises a `ChildFailure`, with the last lines that it printed.
    """
    words = [os.fspath(word) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    # This Python execs the command, which then dies with this process: a kernel that is restarted must not leave an
    # engine behind that holds the GPU's memory.
    wrapped = [sys.executable, "-m", __name__, *words]
    variables = {**environment, "PYTHONUNBUFFERED": "1", "COLUMNS": "110"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            wrapped, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, start_new_session=True
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
        with suppress(ProcessLookupError):  # its group is empty already
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise ChildFailure(
            f"{' '.join(words)} ended with exit status {process.returncode}. All it printed is in {log}; its last "
            f"lines:\n{last_lines(log, 25)}",
            process.returncode,
        )


def call_in_child(module: str, job: Any, failure: str, environment: Mapping[str, str] = os.environ) -> Any:
    """What `python -m MODULE JOB RESULT` makes of a job; both are pickled.

    `ChildProcessError` with the message `failure` if it fails; the last lines that it printed are on the standard
    error then.
    """
    with tempfile.TemporaryDirectory() as directory:
        source, result, log = (Path(directory) / name for name in ("job", "result", "log"))
        source.write_bytes(pickle.dumps(job))
        try:
            run_child([sys.executable, "-m", module, source, result], log, environment=environment)
        except ChildProcessError as error:
            print(last_lines(log, 25), file=sys.stderr)
            raise ChildProcessError(failure) from error
        return pickle.loads(result.read_bytes())


def last_lines(log: Path, count: int) -> str:
    """The last lines of a file that are not empty, as a terminal would leave them."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        text = file.read().decode("utf-8", errors="replace")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)  # escape sequences
    # A progress bar writes over its line again and again.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join([line.rstrip() for line in lines if line.strip()][-count:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
