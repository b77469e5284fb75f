"""What does this project do on your GPU? One command that checks, measures, trains and tests.

    python benchmarks/gpu_hour.py -o gpu-hour              # at most 40 minutes
    python benchmarks/gpu_hour.py -o gpu-hour --minutes 9  # the most valuable parts
    python benchmarks/gpu_hour.py -o rehearsal --rehearse  # tiny sizes, also on a CPU

Nine minutes are for kernels, reloads in three formats, rollouts of 7B in BF16, INT8 and FP8, and
steps of plain TRL and of ours.

Each part is a child process with a log and a time limit. If one fails or hangs, that is recorded,
and the next one starts. The same command with the same directory resumes: it runs all parts that
have not yet succeeded. If time is short, less important parts are skipped. `results.json` holds all
figures; `results.md` is for people.

Formats are measured one after another, not in turns as elsewhere in this directory: engines that
start at the same time misjudge the free memory of a GPU they share. So use a GPU without other
jobs. The durations are guesses.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_hour_report import publish, read_figures, write_atomically
from provenance import ROOT, commit, provenance
from trainers import TRL

from trl_qurl.lab.processes import ChildFailure, last_lines, run_child

PACKAGES = ("vllm", "peft", "matplotlib", "rich", "pytest")
FOLDER = "{folder}"
"""Stands for the part's directory in its command."""

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
PATIENCE = 3.0  # how many times its estimate a part may take, if there is time


@dataclass(frozen=True)
class Part:
    """A part of the plan.

    Attributes:
        name: Also the name of its directory. The word before the first hyphen says how to read its
            results.
        command: What Python runs.
        minutes: Estimated duration.
        priority: 1 is the most important.
        memory_gb: Size of the GPU that it needs.
    """

    name: str
    command: Sequence[str]
    minutes: float
    priority: int
    memory_gb: float = 0.0


def make_plan(rehearse: bool) -> list[Part]:
    """Return the parts in the order in which they run."""
    # the trainer's weights, and three tenths of the GPU for an engine
    large_gb = 0 if rehearse else 60
    measured = ["--output", f"{FOLDER}/record.json", "--repeats", "1" if rehearse else "3"]
    if rehearse:
        measured += ["--engine-dtype", "float32"]

    def script(name: str, size: str, *arguments: str) -> list[str]:
        shape = ["--shape", "tiny" if rehearse else size]
        return [f"{ROOT}/benchmarks/{name}.py", *shape, *arguments]

    def bench(size: str, priority: int) -> Part:
        """Rollouts of an engine alone at 7B; at 0.5B, steps."""
        load = ["--scheme", "int8,fp8", "--batch", "256", "--prompt-len", "32", "--minutes", "1"]
        engine: dict[str, Any] = {"compilation_config": {"mode": 0}}  # compiling takes a minute
        if rehearse:
            load = ["--scheme", "int8,fp8", "--batch", "8", "--train-batch", "4"]
            load += ["--completion-len", "8", "--minutes", "0.1"]
            engine = {"dtype": "float32", "enforce_eager": True}
        load += ["--engine-kwargs", json.dumps(engine), "--output", f"{FOLDER}/bench.json"]
        memory_gb = large_gb if size == "7B" else 0
        return Part(f"bench-{size}", script("shapes", size, *load), 3, priority, memory_gb)

    tokens = ["--completions", "16", "--tokens", "8"]
    if not rehearse:
        tokens = ["--completions", "64", "--tokens", "512"]
    adapter = ["--lora-rank", "16"]  # the optimizer of a whole 7B model would take 120 GB
    if not rehearse:
        adapter += ["--dtype", "bfloat16"]

    def steps(size: str, way: str, minutes: float, priority: int) -> Part:
        arguments = ["--ways", way, *tokens, *(adapter if size == "7B" else []), *measured]
        name = f"steps-{size}-{way.replace(' ', '-')}"
        memory_gb = large_gb if size == "7B" else 0
        return Part(name, script("training_step", size, *arguments), minutes, priority, memory_gb)

    # vLLM's CPU build cannot load the weights that TRL sends.
    first = [TRL, "int8"] if torch.cuda.is_available() or not rehearse else ["int8"]
    others = ["bf16", "fp8"]
    sync = ["--ways", "bf16-stream", "int8-stream", "fp8-stream", "int8-checkpoint", *measured]
    reload = [f"{ROOT}/benchmarks/gpu_reload.py", "--output", f"{FOLDER}/record.json"]
    demo = ["-m", "trl_qurl", "demo", "--output-dir", FOLDER]
    if rehearse:
        demo += ["--rollouts", "10", "--required-share", "-1"]  # too few to learn anything
    tests = ["-m", "pytest", "-q", "-m", "gpu", f"--junitxml={FOLDER}/tests.xml", f"{ROOT}/tests"]
    return [
        Part("reload", reload, 3.5, 1),
        bench("7B", 2),
        *(steps("0.5B", way, 1.25, 3) for way in first),
        *(steps("7B", way, 2.5, 4) for way in (*first, *others)),
        *(steps("0.5B", way, 1.25, 5) for way in others),
        bench("0.5B", 6),
        Part("sync-0.5B", script("weight_sync", "0.5B", *sync), 4, 7),
        Part("demo", demo, 3, 8),
        Part("tests", tests, 8, 9),
    ]


def choose(pending: Sequence[Part], minutes: float) -> list[Part]:
    """Return the parts that fit into the time by their estimates, choosing the most important ones
    first.
    """
    chosen = []
    for part in sorted(pending, key=lambda part: part.priority):
        if part.minutes <= minutes:
            minutes -= part.minutes
            chosen.append(part)
    return [part for part in pending if part in chosen]


def run_part(part: Part, directory: Path, minutes: float) -> dict[str, Any]:
    """Run a part for at most so many minutes, and return what `results.json` says about it."""
    folder, started = directory / part.name, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # results of a failed attempt
    folder.mkdir()
    shown = shlex.join(["python", *part.command]).replace(f"{ROOT}/", "").replace(FOLDER, part.name)
    result: dict[str, Any] = {"status": OK, "reason": "", "command": shown, "exit_status": 0}
    result |= {"date": date.today().isoformat(), "commit": commit(".")}
    command = [sys.executable, *(word.replace(FOLDER, str(folder)) for word in part.command)]

    def check_time(last_line: str) -> None:
        if time.monotonic() - started > 60 * minutes:
            raise TimeoutError

    # Killed processes leave temporary files, and a 7B checkpoint can be one of them.
    with tempfile.TemporaryDirectory(prefix="gpu-hour-", ignore_cleanup_errors=True) as scratch:
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # Killed engines leave semaphores, and that warning would follow the message of an error.
        quiet = {"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
        # trainers would spread over several
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        environment = (
            os.environ
            | quiet
            | {"PYTHONPATH": paths, "TMPDIR": scratch, "CUDA_VISIBLE_DEVICES": first}
        )
        try:
            run_child(command, folder / "log.txt", check_time, every=0.5, environment=environment)
        except TimeoutError:
            result |= {
                "status": FAILED,
                "exit_status": None,
                "reason": f"Killed after {minutes:.1f} minutes.",
            }
        except ChildFailure as error:
            killed = f"Killed by signal {-error.status}. " if error.status < 0 else ""
            reason = f"{killed}{last_lines(folder / 'log.txt', 1) or 'No output.'}"
            result |= {"status": FAILED, "exit_status": error.status, "reason": reason}
    result |= {"seconds": round(time.monotonic() - started, 1), "log": f"{part.name}/log.txt"}
    try:
        result["figures"] = read_figures(part.name.partition("-")[0], folder)
        cells = result["figures"].get("cells", ())
        failures = list(
            dict.fromkeys(
                f"{cell['way']}: {cell['failure']}" for cell in cells if "failure" in cell
            )
        )
    except Exception as error:  # the next part starts in any case
        result["figures"], failures = {}, [f"Wrote no results ({type(error).__name__}: {error})."]
    if failures and result["status"] == OK:
        result |= {"status": FAILED, "reason": "; ".join(failures)}
    return result


def run_plan(
    parts: Sequence[Part], directory: Path, minutes: float, record: dict[str, Any]
) -> None:
    """Run the remaining parts that fit into the time, and save the results after each one."""
    results, deadline = record["parts"], time.monotonic() + 60 * minutes
    pending = []
    for part in parts:
        if results.get(part.name, {}).get("status") == OK:
            print(f"{part.name}: done before")
        elif part.memory_gb > record.get("gpu_gb", 0.0):
            _skip(part, f"Needs a GPU with {part.memory_gb:.0f} GB.", results)
        else:
            pending.append(part)
    while chosen := choose(pending, left := (deadline - time.monotonic()) / 60):
        # Where time is short, important parts run first: one that is faster than its estimate makes
        # room for the next.
        part = (
            chosen[0]
            if len(chosen) == len(pending)
            else min(chosen, key=lambda part: part.priority)
        )
        pending.remove(part)
        # A part that hangs must not cost the more important ones their time.
        reserved = sum(other.minutes for other in chosen if other.priority < part.priority)
        limit = min(PATIENCE * part.minutes, left - reserved)
        print(
            f"{part.name}: about {part.minutes:g} minutes, at most {limit:.1f}; {left:.0f} are "
            "left",
            flush=True,
        )
        result = results[part.name] = run_part(part, directory, limit)
        print(
            f"{part.name}: {result['status']} after {result['seconds']:.0f} s. "
            f"{result['reason'][:300]}",
            flush=True,
        )
        publish(record, directory)
    for part in pending:
        reason = (
            f"Takes about {part.minutes:g} minutes, but {max(left, 0.0):.1f} were left. The same "
            "command resumes."
        )
        _skip(part, reason, results)
    record["parts"] = {part.name: results[part.name] for part in parts}
    publish(record, directory)


def _skip(part: Part, reason: str, results: dict[str, Any]) -> None:
    """Record that a part was skipped, unless it failed before."""
    print(f"{part.name}: skipped. {reason}")
    if results.get(part.name, {}).get("status") != FAILED:
        results[part.name] = {"status": SKIPPED, "reason": reason, "figures": {}}


def open_record(directory: Path, setup: dict[str, Any]) -> dict[str, Any]:
    """Return the results so far, with the provenance of this run.

    Raises:
        ValueError: If the directory holds something else.
    """
    path = directory / "results.json"
    cuda = torch.cuda.is_available()
    record = {
        **provenance(torch.device("cuda" if cuda else "cpu"), measured="."),
        **setup,
        "parts": {},
    }
    if cuda:
        record["gpu_gb"] = round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1)
    if path.exists():
        try:
            before = json.loads(path.read_text())
            record["parts"] = before["parts"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}): choose another -o.") from error
        for name in ("hardware", *setup):
            if (value := before.get(name)) != record[name]:
                raise ValueError(
                    f"{path} has {name} {value!r}, but now it is {record[name]!r}: choose another "
                    "-o."
                )
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(
            f"{directory} is neither an empty directory nor one of this command's: choose another "
            "-o."
        )
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Check the options, run the plan, and return exit status 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIRECTORY", help="for results and logs"
    )
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="time for all parts (default: %(default)g)"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny models, in float32 where there is a choice"
    )
    arguments = parser.parse_args(argv)
    try:
        if not arguments.minutes > 0:
            raise ValueError(f"--minutes is {arguments.minutes:g}: give more than 0.")
        if not torch.cuda.is_available() and not arguments.rehearse:
            raise ValueError(
                "torch sees no GPU (`trl-qurl doctor` says why): pass --rehearse to try this on a "
                "CPU."
            )
        if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
            raise ValueError(
                f"Not installed: {', '.join(missing)}. Run `make setup`, and use .venv/bin/python."
            )
        record = open_record(arguments.output, {"rehearsal": arguments.rehearse})
        arguments.output.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.output / "results.json", json.dumps(record, indent=2))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        run_plan(
            make_plan(arguments.rehearse),
            arguments.output.resolve(),
            arguments.minutes,
            record,
        )
    except KeyboardInterrupt:
        print("Interrupted. The same command resumes.")
        return 130
    print(f"Written to {arguments.output}: results.md, results.json, pictures and logs")
    return int(any(part["status"] == FAILED for part in record["parts"].values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, which kills the running part
    sys.exit(main())
