"""Run checks that import torch or vLLM in a separate process with a time limit."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from importlib import import_module
from pathlib import Path

from trl_qurl.cli.noise import shows_everything
from trl_qurl.lab.doctor.report import Line, Status
from trl_qurl.lab.processes import (
    ENGINE_ENVIRONMENT,
    ChildFailure,
    call_command,
    last_lines,
    run_child,
)

LOG_LINES = 25  # last lines to keep of a failed process's output
LONGEST = 400  # characters of an error

ADVICE = {
    r"undefined symbol|libcudart|libtorch\S* cannot open|libc10": (
        "The installed vLLM and torch builds do not match: install both together "
        "(docs/installation.md)."
    ),
    r"out of memory|No available memory for the cache|Free memory on device": (
        "Another process may be using the memory (check nvidia-smi or free): stop it and try again."
    ),
    r"No space left on device|SIGBUS|Bus error": (
        "Free up space in /dev/shm and in the temporary directory; start containers with "
        "--shm-size=8g."
    ),
    r"[Ff]ailed to find a kernel": (
        "vLLM has no kernel for this format here, or VLLM_DISABLED_KERNELS disables it: see the "
        "lines `formats` and `variables`."
    ),
    "cannot reload its kernel": (
        "Use another rollout_quantization; `trl-qurl doctor --scheme FORMAT` tries one."
    ),
}
"""Advice by pattern of an error from other libraries, which name the problem but not the fix."""

DEFAULT_ADVICE = (
    "See docs/troubleshooting.md, and the full output of `TRL_QURL_DEBUG=1 trl-qurl doctor`. If "
    "that does not help, open an issue with the output of `trl-qurl doctor --json`."
)


def check_in_child(name: str, module: str, seconds: float, *arguments: str) -> list[Line]:
    """Return the lines of a module's `check(*arguments)`.

    If its process fails, the only line is named `name` and says how.
    """
    deadline = time.monotonic() + seconds

    def watch(last_line: str) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"did not finish within {seconds:.0f} s; last output: {last_line or 'none'}"
            )

    with tempfile.TemporaryDirectory(prefix="trl-qurl-doctor-") as directory:
        command, result = call_command(answer, (module, *arguments), Path(directory))
        log = result.with_name("log")
        # Temporary files go here, so they are deleted even if the process was killed.
        environment = ENGINE_ENVIRONMENT | os.environ | {"HF_HUB_OFFLINE": "1", "TMPDIR": directory}
        try:
            run_child(command, log, watch, every=0.3, environment=environment)
        except TimeoutError as error:
            fault = str(error)
        except ChildFailure as failure:
            fault = f"exited with status {failure.status}"
            if failure.status < 0:
                fault = f"was killed by {signal.Signals(-failure.status).name}"
            fault += f"; last output: {last_lines(log, 1) or 'none'}"
        if result.exists():
            outcome: list[Line] | str = pickle.loads(result.read_bytes())
            if isinstance(outcome, list):  # also if an engine failed only when it was stopped
                return outcome
            fault = outcome
        tail = last_lines(log, LOG_LINES)
        if shows_everything():
            print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
    told = f"{fault}\n{tail}"
    matching = (advice for pattern, advice in ADVICE.items() if re.search(pattern, told))
    advice = next(matching, DEFAULT_ADVICE)
    text = textwrap.shorten(fault, LONGEST)
    return [Line(name, text, Status.FAILED, advice, {"log": tail.split("\n")})]


def answer(call: tuple[str, ...]) -> list[Line] | str:
    """Call `check` of a module of this package; return its lines, or its error as text."""
    module, *arguments = call
    try:
        return import_module(f"trl_qurl.lab.doctor.{module}").check(*arguments)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
