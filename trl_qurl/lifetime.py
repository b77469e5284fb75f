"""Processes that must not outlive the command that started them."""

import ctypes
import os
import signal
import sys

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux' prctl


def die_with_parent() -> None:
    """Leave no process behind that goes on working when the command itself is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == 1:  # it was killed before this line
            os._exit(1)
