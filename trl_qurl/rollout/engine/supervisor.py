"""`trl-qurl serve --restart`: a server that is started again when it dies."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

SHORT_LIFE = 60.0  # seconds; a server that dies sooner, `MOST_SHORT_LIVES` times in a row, is not started again
MOST_SHORT_LIVES = 5


def supervise(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Keep a server running until it ends with status 0 or by a signal to this process. Returns its last status."""
    running: list[int] = []  # the server, which leads a process group with all that it starts
    is_ending = False

    def end(number: int, frame: object) -> None:
        nonlocal is_ending
        is_ending = True
        for server in running:
            with suppress(ProcessLookupError):  # it has just died by itself
                os.killpg(server, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    short_lives = 0
    while True:
        started = time.monotonic()
        server = subprocess.Popen(command, env=environment, process_group=0, preexec_fn=_end_with_parent)
        running.append(server.pid)
        if is_ending:
            server.terminate()  # the signal came before there was a server
        status = server.wait()
        running.clear()
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # what it left would keep its memory
        short_lives = short_lives + 1 if time.monotonic() - started < SHORT_LIFE else 0
        if is_ending or status == 0 or short_lives == MOST_SHORT_LIVES:
            return status if status >= 0 else 128 - status  # as a shell reports a signal
        print(f"trl-qurl: the server died (status {status}); starting it again", file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    """Let Linux end this process when its parent is killed."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
