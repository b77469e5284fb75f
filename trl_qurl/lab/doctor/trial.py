"""Runs one job in a process of its own, within a time, and tells what came of it line by line."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trl_qurl.cli.noise import shows_everything
from trl_qurl.lab.doctor.advice import advice_for
from trl_qurl.lab.doctor.lines import Line, Status, failed, skipped
from trl_qurl.lab.doctor.plan import Job
from trl_qurl.lab.processes import ENGINE_ENVIRONMENT, ChildFailure, last_lines, run_child

KEPT_LINES = 25  # of what a process that failed has printed
LONGEST = 400  # characters of an error
POLL_SECONDS = 0.3

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def try_job(job: Job, gpu: str | None, time_limit: float, report: Callable[[Line], None]) -> None:
    """Report each line of a job as it comes; where it ends before the last one, say why.

    Args:
        job: What to try.
        gpu: The only one that it may see, as CUDA_VISIBLE_DEVICES names it; `None` for all.
        time_limit: Seconds that it may take.
        report: Called with each line.
    """
    deadline = time.monotonic() + time_limit
    missing = list(job.lines)
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="trl-qurl-doctor-") as directory:
        result, log = Path(directory) / "result", Path(directory) / "log"
        result.touch()
        read = 0

        def collect(last_line: str = "") -> None:
            nonlocal read
            complete = result.read_text(encoding="utf-8").split("\n")[read:-1]
            read += len(complete)
            for record in map(json.loads, complete):
                if "error" in record:
                    errors.append(record["error"])
                else:
                    report(Line(**record | {"status": Status(record["status"])}))
                    missing.remove(record["name"])

        def watch(last_line: str) -> None:
            collect()
            if time.monotonic() > deadline:
                raise TimeoutError(f"did not end within {time_limit:.0f} s; it printed last: {last_line or 'nothing'}")

        # Files of the trial are removed with the directory, also those of a process that was killed.
        environment = ENGINE_ENVIRONMENT | os.environ | ENVIRONMENT | {"TMPDIR": directory}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        fault = "ended without an answer"
        try:
            run_child(job.command(result), log, watch, POLL_SECONDS, environment)
        except ChildFailure as failure:
            fault = describe_end(failure.status, last_lines(log, 1))
        except TimeoutError as error:
            fault = str(error)
        collect()
        said = last_lines(log, KEPT_LINES)
        if missing and shows_everything():
            print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
    if missing:
        fault = errors[0] if errors else fault
        first, *others = missing
        text = fault if len(fault) <= LONGEST else f"{fault[:LONGEST]} ..."
        report(failed(first, text, advice_for(f"{fault} {said}", first), log=said.split("\n")))
        for name in others:
            report(skipped(name, f"{first} failed"))


def describe_end(status: int, last_line: str) -> str:
    """How a process ended that could not say so itself."""
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    return f"{how}; it printed last: {last_line or 'nothing'}"
