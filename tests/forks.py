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
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Listener, wait
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


CLIENT = """#!{python}
import os
import sys
from multiprocessing.connection import Client

if sys.argv[1] != "-m" and sys.argv[1].startswith("-"):  # such as PyTorch's compiler trying what the processor has
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with Client({address!r}) as server:
    outputs = [os.readlink(f"/proc/self/fd/{{descriptor}}") for descriptor in (1, 2)]
    server.send((sys.argv[1:], os.getcwd(), dict(os.environ), outputs))
    sys.exit(server.recv())
"""


class WarmPython:
    """
    A program that takes the arguments of `python` and is a fork of a process that has imported everything.

    For code that starts `sys.executable` often; what is started this way has this program as its `sys.executable` too.
    Output must go to files. Who kills the program kills the fork.

    Args:
        forks: Where the processes come from.
        directory: For the program.
    """

    def __init__(self, forks: Forks, directory: Path) -> None:
        self.path = directory / "python"
        self._context = forks._context
        self._listener = Listener(str(directory / "socket"), backlog=8)
        self.path.write_text(CLIENT.format(python=sys.executable, address=self._listener.address))
        self.path.chmod(0o755)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Start no further process."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # it is closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        process = self._context.Process(target=be_python, args=(str(self.path), *connection.recv()))
        process.start()
        wait([process.sentinel, connection])  # a connection that ends is a client that was killed
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        with suppress(OSError):  # nobody waits for it
            connection.send(process.exitcode)


def be_python(
    executable: str, arguments: list[str], directory: str, environment: dict[str, str], outputs: list[str]
) -> None:
    """Become the process that `python ARGUMENTS` would be, for a script or `-m MODULE`."""
    os.setsid()
    for path, descriptor in zip(outputs, (1, 2), strict=True):
        with open(path, "ab") as output:
            os.dup2(output.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.executable = executable
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


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
