"""Options of `trl-qurl doctor`, and its checks in order: inspections first, then real trials."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from trl_qurl.lab.comparison import read_schemes, split_schemes
from trl_qurl.lab.doctor.environment import INSPECTIONS
from trl_qurl.lab.doctor.report import Line, Status, as_json, as_text
from trl_qurl.lab.processes import ChildFailure, call_in_child

IMPORT_SECONDS = 120.0  # time limit for importing torch
TRIAL_SECONDS = 600.0  # per trial; most of it is for compiling on a slow machine
LONGEST = 400  # characters of an error
V2 = "VLLM_USE_V2_MODEL_RUNNER"  # which GPUs use by default

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
    "": (
        "See docs/troubleshooting.md. If that does not help, open an issue with the output of "
        "`trl-qurl doctor --json`."
    ),
}
"""Advice by pattern of an error, of which the first that matches counts.

Other libraries name the problem, but not the fix.
"""


class Retry(NamedTuple):
    """Another way to run vLLM, for a trial that failed on a GPU."""

    way: str
    setting: str  # with which a user trains in this way
    engine: Mapping[str, object] = {}  # arguments of an engine in the trainer's process
    variables: Mapping[str, str] = {}


UNCOMPILED = {"compilation_config": {"mode": 0}}
EAGER = {"enforce_eager": True}
RETRIES = (
    Retry("without torch.compile", f"vllm_engine_kwargs={UNCOMPILED}", UNCOMPILED),
    Retry("with vLLM's older model runner", f"{V2}=0", variables={V2: "0"}),
    Retry("without CUDA graphs", f"vllm_engine_kwargs={EAGER}", EAGER),
)
"""From the least that training loses to the most."""


class Trial(NamedTuple):
    """A check that starts an engine."""

    name: str
    module: str
    form: str  # format of its rollouts
    least_gpus: int = 0
    needs: str = ""  # another trial, which must not have failed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl doctor`."""
    parser.epilog = (
        "docs/troubleshooting.md explains each line. The exit status is 1 if a required check "
        "fails."
    )
    parser.add_argument("--quick", action="store_true", help="skip the trials, which start engines")
    parser.add_argument(
        "--json", action="store_true", help="print JSON for bug reports: no secrets, no home paths"
    )
    parser.add_argument(
        "--scheme",
        type=split_schemes,
        metavar="FORMAT[,FORMAT...]",
        default=[],
        help=(
            "formats to train in; none means 16 bits (default: the first that this machine has "
            "kernels for)"
        ),
    )


def run(args: argparse.Namespace) -> int:
    """Run the checks and print each line as soon as it is ready."""
    with suppress(ImportError, OSError):  # if torch cannot be imported, the report says so
        read_schemes(args.scheme)
    lines: list[Line] = []
    for line in examine(args.scheme, args.quick):
        if not args.json:
            print(as_text(line), flush=True)
        lines.append(line)
    failures = [line.name for line in lines if line.status is Status.FAILED]
    if args.json:
        print(as_json(lines))
    elif failures:
        print(f"FAILED: {', '.join(failures)}.")
    else:
        print("No check failed.")
    return 1 if failures else 0


def examine(formats: Sequence[str], quick: bool) -> Iterator[Line]:
    """Yield the result of each check; standard error announces those that take long."""
    failed: list[str] = []  # required lines
    for check in INSPECTIONS:
        try:
            line = check()
        except Exception as error:  # the other lines are still useful
            name = check.__name__.removeprefix("check_")
            text = f"could not be determined ({type(error).__name__}: {error})."
            line = Line(name, text, Status.NOTE)
        if line.name == "vllm" and line.status is Status.FAILED:
            failed.append(line.name)
        yield line
    devices = check_in_child("torch", "device", IMPORT_SECONDS)
    failed += [line.name for line in devices if line.status is Status.FAILED]
    yield from devices
    gpus = devices[0].data.get("gpus", 0)
    for trial in list_trials(formats or devices[-1].data.get("formats", ["int8"])[:1], gpus):
        reason = ""
        obstacles = [name for name in failed if name in ("vllm", "torch", "formats", trial.needs)]
        if obstacles:
            reason = f"depends on the line {obstacles[0]}, which failed"
        elif quick:
            reason = "--quick starts no engine"
        elif gpus < trial.least_gpus:
            reason = f"needs {trial.least_gpus} GPU{'s' if trial.least_gpus > 1 else ''}"
        if reason:
            yield Line(trial.name, reason, Status.SKIPPED)
            continue
        print(f"{trial.name}: this may take minutes.", file=sys.stderr)
        [line] = check_in_child(trial.name, trial.module, TRIAL_SECONDS, trial.form, trial.name)
        if line.status is Status.FAILED:
            failed.append(trial.name)
            if gpus:
                line = with_culprit(trial, line)
        yield line


def with_culprit(trial: Trial, line: Line) -> Line:
    """Try what failed in other ways; advise the first that works, which names the culprit."""
    tried = []
    for retry in RETRIES:
        is_chosen = V2 in retry.variables and V2 in os.environ
        if is_chosen or (retry.engine and trial.module == "server"):  # an eager one
            continue
        print(f"{trial.name}: again, {retry.way}.", file=sys.stderr)
        arguments: list[object] = [trial.form, trial.name]
        if retry.engine:
            arguments.append(retry.engine)
        [again] = check_in_child(
            trial.name, trial.module, TRIAL_SECONDS, *arguments, **retry.variables
        )
        if again.status is not Status.FAILED:
            advice = (
                f"It works {retry.way}: train with {retry.setting}, and open an issue with the "
                "output of `trl-qurl doctor --json`."
            )
            return replace(line, advice=advice)
        tried.append(retry.way)
    if not tried:
        return line
    return replace(line, advice=f"It fails {', '.join(tried)}, too. {line.advice}")


def list_trials(formats: Sequence[str], gpus: int) -> list[Trial]:
    """Return a trial for each format, and those in the first one alone.

    On a GPU, trainer and server need one each.
    """
    trials = []
    for form in formats:
        name = "mixed" if form.startswith("{") else form
        trials.append(Trial(f"train-{name}", "trial", form))
    first = trials[0]
    sleep = Trial("sleep", "trial", first.form, 1, needs=first.name)
    server = Trial("server", "server", first.form, 2 if gpus else 0, needs=first.name)
    return [*trials, sleep, server]


def check_in_child(
    name: str, module: str, seconds: float, *arguments: object, **variables: str
) -> list[Line]:
    """Return the lines of a module's `check(*arguments)`, with these variables.

    If its process fails, the only line is named `name` and says how.
    """
    with tempfile.TemporaryDirectory(prefix="trl-qurl-doctor-") as directory:
        # Temporary files go here, so they are deleted even if the process was killed.
        environment = {"HF_HUB_OFFLINE": "1", "TMPDIR": directory, **variables}
        try:
            return call_in_child(
                answer, (module, *arguments), seconds=seconds, environment=environment
            )
        except ChildFailure as failure:
            told = f"{failure.fault}\n{failure.output}"
    advice = next(advice for pattern, advice in ADVICE.items() if re.search(pattern, told))
    fault, *log = told.split("\n")
    text = textwrap.shorten(f"{fault}; last output: {log[-1] or 'none'}", LONGEST)
    return [Line(name, text, Status.FAILED, advice, {"log": log})]


def answer(call: tuple[Any, ...]) -> list[Line]:
    """Call `check` of a module of this package, which may import torch."""
    module, *arguments = call
    return import_module(f"trl_qurl.lab.doctor.{module}").check(*arguments)
