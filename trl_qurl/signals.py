"""Signals that end a process: they raise, so that `finally` cleans up files and processes."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Of a service manager or batch system, and of a terminal that is closed.
ENDING = (signal.SIGTERM, signal.SIGHUP)


def _exit(number: int, frame: FrameType | None) -> None:
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)  # what cleans up is not interrupted
    raise SystemExit(128 + number)  # as shells report it


@contextmanager
def exits_on_signals() -> Iterator[None]:
    """Inside the block, raise `SystemExit` on SIGTERM and SIGHUP.

    A program's own handlers stay.
    """
    ours = []
    if threading.current_thread() is threading.main_thread():  # no other thread may set a handler
        ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
