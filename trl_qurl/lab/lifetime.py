"""Processes that must not outlive the command that started them.

    python -m trl_qurl.lab.lifetime COMMAND...

becomes any command, which then dies with whoever started it.
"""

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


def main(command: list[str]) -> int:
    """Become the command; what was asked of the system outlives that."""
    die_with_parent()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}.", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
