"""The worker that does the algebra, from the side of those who ask it.

One process (`process`) per asking process, started at the first question. It is a fresh interpreter that imports
nothing but this package and math-verify, so it neither shares CUDA nor the locks of this process's threads, and does
not run the user's main module again. Questions of several threads take turns.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time

from trl_qurl.lab.grading import process

STARTUP_TIMEOUT = 120.0
"""Seconds for the imports, which a cold network file system makes slow; no answer counts as wrong meanwhile."""

ANSWER_TIMEOUT = process.WAITING_TIME + 2.0
"""Seconds after which the worker itself is given up; its own timers end a comparison before that."""


_COMMAND = f"from {process.__name__} import main; main()"


class OutOfTimeError(Exception):
    """The comparison was ended; whether the two are equal is not known."""


class WorkerEndedError(Exception):
    """The worker is gone, which no answer can cause."""


def compare(given: str, expected: str) -> bool:
    """Whether two normalised answers are equal, by the worker's verdict.

    Raises:
        OutOfTimeError: if the comparison took too long or too much memory.
        ImportError: if math-verify is not installed.
        RuntimeError: if the worker does not start, or ends twice without an answer.
    """
    with _lock:
        with contextlib.suppress(WorkerEndedError):
            return _started().compare(given, expected)
        try:
            return _started().compare(given, expected)
        except WorkerEndedError as error:
            raise RuntimeError(f"The process that grades answers ended twice ({error}).") from error


def stop() -> None:
    """End the worker, if there is one; the next question starts another."""
    global _worker
    with _lock:
        if _worker is not None:
            _worker.close()
        _worker = None


class _Worker:
    def __init__(self) -> None:
        # -P and this process's path: the worker imports what this one would, and not what lies about in its directory.
        path = os.pathsep.join(str(entry) or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # The order of sets decides how SymPy goes about a comparison.
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # an interrupt from the keyboard is not for it; `close` ends the whole session
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._unread = b""
        try:
            self._await_start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def compare(self, given: str, expected: str) -> bool:
        try:
            self._input.write(json.dumps([given, expected]).encode() + b"\n")
            verdict = self._read_line(ANSWER_TIMEOUT)
        except BaseException as error:
            # The verdict still to come must not be taken for that of the next question.
            self.close()
            if isinstance(error, OSError):
                raise WorkerEndedError(str(error)) from error
            raise
        if verdict == process.OUT_OF_TIME:
            raise OutOfTimeError
        return verdict == process.EQUAL

    def is_usable(self) -> bool:
        return not self._input.closed and self._process.poll() is None

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.forget()

    def forget(self) -> None:
        """Let go of the pipes, as a process must that inherited them."""
        self._input.close()
        self._output.close()

    def _await_start(self) -> None:
        try:
            reply = self._read_line(STARTUP_TIMEOUT)
        except (WorkerEndedError, OutOfTimeError) as error:
            raise RuntimeError(
                f"The process that grades answers did not start within {STARTUP_TIMEOUT:.0f} s or ended at once; "
                "what it wrote to the standard error says why."
            ) from error
        if reply.startswith(process.MISSING):
            detail = reply.removeprefix(process.MISSING).strip()
            raise ImportError(f"Grading needs math-verify: run `pip install trl-qurl[math]` ({detail}).")
        if reply != process.READY:
            raise RuntimeError(
                "The process that grades answers failed its own test, x(x+1) = x^2+x: is there a limit on memory or "
                "processes (`ulimit -a`)?"
            )

    def _read_line(self, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        poll = select.poll()  # select() would refuse the high file descriptors of a process with many files open
        poll.register(self._output.fileno(), select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise OutOfTimeError
            chunk = os.read(self._output.fileno(), 1 << 12)
            if not chunk:
                raise WorkerEndedError(f"status {self._process.wait()}")
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()


def _started() -> _Worker:
    global _worker
    if _worker is not None and not _worker.is_usable():
        _worker.close()
        _worker = None
    if _worker is None:
        _worker = _Worker()
    return _worker


def _after_fork() -> None:
    """A forked child has a worker of its own, and no lock that some thread of its parent held."""
    global _lock, _worker
    _lock = threading.Lock()
    if _worker is not None:
        _worker.forget()
    _worker = None


_lock = threading.Lock()
_worker: _Worker | None = None
os.register_at_fork(after_in_child=_after_fork)
atexit.register(stop)
