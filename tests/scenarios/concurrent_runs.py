"""Many runs that start and end at once, each with a directory for checkpoints: does any of them
lose its own?

Each run is a process that writes a file where its engine would look for a checkpoint, and reads it
again before it ends: it removes the directory, drops it, exits as Python does, or
kills itself. Some fork in between, as data loaders do; those forks exit, or outlive the run.
"""

import atexit
import os
import random
import signal
import sys
import time
import weakref
from collections import Counter
from pathlib import Path

from child import print_record

from trl_qurl.quantization.files import PrivateDirectory

AT_ONCE = 40
ENDS = ("remove", "drop", "exit", "kill")


def exit_as_python_does():
    atexit._run_exitfuncs()
    os._exit(0)


def run(parent, losses, chance):
    """Be one run. What it lost is appended to a file."""
    directory = PrivateDirectory(parent, 0)
    checkpoint = directory.path / "config.json"
    owner = str(os.getpid())
    checkpoint.write_text(owner)
    # as an engine takes its time to shut down, before the directory goes
    weakref.finalize(run, time.sleep, 0.05)
    end = chance.choice(ENDS)
    fork = chance.choice(("none", "exits", "outlives"))
    if fork != "none" and os.fork() == 0:
        time.sleep(0.05 * (fork == "outlives"))
        exit_as_python_does()
    time.sleep(chance.uniform(0, 0.1))
    if not checkpoint.exists() or checkpoint.read_text() != owner:
        with losses.open("a") as file:
            file.write(f"{checkpoint} of {owner}\n")
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "remove":
        directory.remove()
    elif end == "drop":
        del directory
    exit_as_python_does()


def keep_running(parent, losses, runs):
    """Make so many runs, 40 of them at a time, and count how they ended."""
    statuses = Counter()
    ended, held = os.pipe()  # all hold it, also forks that outlive their runs

    def await_one():
        _, status = os.wait()
        statuses[os.waitstatus_to_exitcode(status)] += 1

    for seed in range(runs):
        if os.fork() == 0:
            try:
                run(parent, losses, random.Random(seed))
            finally:
                os._exit(1)
        if seed >= AT_ONCE:
            await_one()
    for _ in range(AT_ONCE):
        await_one()
    os.close(held)
    os.read(ended, 1)  # returns when the last one has ended
    return statuses


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    runs = int(sys.argv[2])
    lost = folder / "lost"
    lost.touch()
    ends = keep_running(f"{folder}/rollouts", lost, runs)
    print_record({"ends": ends, "lost": lost.read_text().splitlines()})
