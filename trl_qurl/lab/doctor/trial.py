"""Run one job in a separate process with a time limit, and report its result line by line."""

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

LOG_LINES = 25  # last lines to keep of a failed process's output
LONGEST = 400  # characters of an error
POLL_SECONDS = 0.3

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def try_job(job: Job, gpu: str | None, time_limit: float, report: Callable[[Line], None]) -> None:
    """Run a job and report each line as it arrives; report a failure if the job ends before its last line.

    Args:
        job: The test to run.
        gpu: The only GPU visible to the job, as a value of CUDA_VISIBLE_DEVICES; `None` for all.
        time_limit: Time limit in seconds.
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
                raise TimeoutError(f"did not finish within {time_limit:.0f} s; last output: {last_line or 'none'}")

        # Temporary files go here, so they are deleted even if the process was killed.
        environment = ENGINE_ENVIRONMENT | os.environ | ENVIRONMENT | {"TMPDIR": directory}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        fault = "exited without a result"
        try:
            run_child(job.command(result), log, watch, POLL_SECONDS, environment)
        except ChildFailure as failure:
            fault = describe_end(failure.status, last_lines(log, 1))
        except TimeoutError as error:
            fault = str(error)
        collect()
        tail = last_lines(log, LOG_LINES)
        if missing and shows_everything():
            print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
    if missing:
        fault = errors[0] if errors else fault
        first, *others = missing
        text = fault if len(fault) <= LONGEST else f"{fault[:LONGEST]} ..."
        report(failed(first, text, advice_for(f"{fault} {tail}", first), log=tail.split("\n")))
        for name in others:
            report(skipped(name, f"{first} failed"))


def describe_end(status: int, last_line: str) -> str:
    """Describe how a process ended that left no error message."""
    cause = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    return f"{cause}; last output: {last_line or 'none'}"
