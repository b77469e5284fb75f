"""The process that does the algebra, started and asked by `worker`.

It imports the libraries once and forks; the fork serves pairs, each line of input a pair as JSON, each line of output
a verdict. The kernel's timers end a fork that takes too long, even inside a single multiplication; the process says so
in its place and forks again, which costs milliseconds. Both end when the input ends or the process that asks is gone.
"""

from __future__ import annotations

import gc
import json
import logging
import mmap
import os
import resource
import select
import signal
import sys
from typing import NoReturn

COMPUTING_TIME = 1.0
"""Seconds of a processor that a pair may take. Unlike the clock, it does not depend on what else the machine does."""

WAITING_TIME = 13.0
"""Seconds on the clock that a pair may take, for one that waits and does not compute."""

MEMORY = 1 << 30
"""Bytes that a fork may take on top of the libraries."""

PAIRS_PER_FORK = 500
"""After which a new fork takes over, so that what the libraries keep in memory stays bounded."""

READY, MISSING, BROKEN = "ready", "missing", "broken"
EQUAL, DIFFERENT, OUT_OF_TIME = "equal", "different", "out of time"

_FINISHED, _REPLACED, _FAILED = 0, 10, 11  # exit statuses of a fork
_INPUT, _OUTPUT, _ERROR = 0, 1, 2
_OWNER_CHECK = 10_000  # milliseconds
_EXAMPLES = [
    (r"\frac{\sqrt{3}}{2}+\pi", r"\frac{\sqrt{3}+2\pi}{2}"),
    (r"3x^{2}-2xy+1", r"1+x\cdot(3x-2y)"),
    (r"2^{n-1} \sin \theta", r"\frac{2^{n}\sin(\theta)}{2}"),
    (r"(x-1)(x+1)/4", r"\frac{x^{2}-1}{4}"),
    (r"\frac{1}{4}-\frac{3}{7} i", r"e^{-2} \ln 2"),
    (r"\sqrt[3]{4} \binom{5}{2} n!", r"\log_{2} 8 \cdot |x|"),
]


def main() -> None:
    """Serve pairs until the input ends or the process that the first argument names is gone."""
    owner = int(sys.argv[1])
    requests, replies, null = os.dup(_INPUT), os.dup(_OUTPUT), os.open(os.devnull, os.O_RDWR)
    for descriptor in (_INPUT, _OUTPUT):
        os.dup2(null, descriptor)  # what a library prints is no verdict
    for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)  # the parent may have had them ignored
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        works = _warm_up()
    except ImportError as error:
        _reply(replies, f"{MISSING} {error}")
        return
    _reply(replies, READY if works else BROKEN)
    gc.freeze()
    is_busy = mmap.mmap(-1, 1)  # shared with the forks
    while True:
        child = os.fork()
        if child == 0:
            os.dup2(null, _ERROR)
            _serve(requests, replies, is_busy, owner)
        _, status = os.waitpid(child, 0)
        if is_busy[0]:
            is_busy[0] = 0
            _reply(replies, OUT_OF_TIME)
        elif os.waitstatus_to_exitcode(status) != _REPLACED:
            return


def _warm_up() -> bool:
    """Import the libraries, let the parser learn common notation, so that no fork has to, and see that they work."""
    import latex2sympy2_extended  # noqa: F401
    import math_verify  # noqa: F401

    logging.disable(logging.CRITICAL)  # math-verify warns that its timeouts are off
    for given, expected in _EXAMPLES:
        _verdict(given, expected)
    return _verdict("x(x+1)", "x^2+x") == EQUAL and _verdict("x(x+1)", "x^2-x") == DIFFERENT


def _serve(requests: int, replies: int, is_busy: mmap.mmap, owner: int) -> NoReturn:
    """A fork's life."""
    try:
        _limit_memory()
        for _ in range(PAIRS_PER_FORK):
            line = _next_line(requests, owner)
            if not line:
                os._exit(_FINISHED)
            is_busy[0] = 1
            signal.setitimer(signal.ITIMER_PROF, COMPUTING_TIME)
            signal.setitimer(signal.ITIMER_REAL, WAITING_TIME)
            verdict = _verdict(*json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            is_busy[0] = 0
            _reply(replies, verdict)
        os._exit(_REPLACED)
    finally:
        os._exit(_FAILED)


def _verdict(given: str, expected: str) -> str:
    from sympy.core.random import seed

    from trl_qurl.lab.grading import algebra, comparison

    seed(0)
    return EQUAL if comparison.equal(given, expected, algebra.equal) else DIFFERENT


def _next_line(requests: int, owner: int) -> bytes:
    """What the owner wrote; empty when it is gone, even if some child of it holds its end of the pipe."""
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        while not poll.poll(_OWNER_CHECK):
            if not _is_alive(owner):
                return b""
        chunk = os.read(requests, 1 << 16)
        if not chunk:
            return b""
        line += chunk
    return line


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = used + MEMORY if most == resource.RLIM_INFINITY else min(used + MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reply(replies: int, line: str) -> None:
    os.write(replies, line.replace("\n", " ").encode("ascii", "replace") + b"\n")
