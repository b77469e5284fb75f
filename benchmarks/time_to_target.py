"""How long does a run take to reach an accuracy, with 16-bit and with quantized rollouts?

    python benchmarks/time_to_target.py                                   # the demonstration: 25 minutes on two cores
    python benchmarks/time_to_target.py --seeds 0 --rollouts 30 --target 0.5
    python benchmarks/time_to_target.py --logs benchmarks/objectives/runs/main/{bf16,int8_acr,int8_tis}-seed*.jsonl.gz

The only figure that counts: a rollout that is faster and teaches less gains nothing. Formats take turns, seed by seed;
each run is `trl-qurl demo` in a separate process (three-digit addition, half a million parameters). Its exact
accuracy after every rollout is averaged over five; the seconds are those of sync, generation, log-probabilities and
updates until that average reaches the target. Warm start, engine start and measuring are left out. `--logs` reads runs
that were made before, such as those of the study of objectives.
"""

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record
from rich import box
from rich.console import Console
from rich.table import Table

from trl_qurl.lab.demo.algorithms import UPDATES_PER_ROLLOUT
from trl_qurl.lab.runs import read_run

FORMATS = {"bf16": "none", "int8": "int8", "fp8": "fp8"}
PARTS = ("sync", "generate", "logps", "update")
AVERAGED = 5


def seconds_of(row: dict[str, Any]) -> float:
    """One rollout and its updates, over which the mean of `time/update_s` is logged."""
    times = {part: row.get(f"time/{part}_s") or 0.0 for part in PARTS}
    return sum(times.values()) + (UPDATES_PER_ROLLOUT - 1) * times["update"]


def reached(rows: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """Rollouts and seconds until the average accuracy of the last rollouts is `target`; `None` where it never was."""
    spent = 0.0
    accuracies: list[float] = []
    for number, row in enumerate(rows, start=1):
        spent += seconds_of(row)
        accuracies.append(row["expected_accuracy"])
        if number >= AVERAGED and statistics.mean(accuracies[-AVERAGED:]) >= target:
            return {"rollouts": number, "seconds": spent}
    return {"rollouts": None, "seconds": None}


def summed_up(name: str, seed: int, rows: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """The cell of one run."""
    return {
        "format": name,
        "seed": seed,
        **reached(rows, target),
        "step_s": statistics.median(seconds_of(row) for row in rows),
        "generate_s": statistics.median(row["time/generate_s"] for row in rows),
        "final_accuracy": statistics.mean(row["expected_accuracy"] for row in rows[-AVERAGED:]),
    }


def measure(name: str, seed: int, rollouts: int, target: float, directory: Path) -> dict[str, Any]:
    """One run; its failure is a result."""
    place = directory / f"{name}-{seed}"
    command = [sys.executable, "-m", "trl_qurl", "demo", "--scheme", FORMATS[name], "--required-share", "-9"]
    command += ["--rollouts", str(rollouts), "--seed", str(seed), "--output-dir", str(place)]
    done = subprocess.run(command)
    if done.returncode:
        return {"format": name, "seed": seed, "failure": f"exit status {done.returncode}: {' '.join(command)}"}
    by_step: dict[int, dict[str, Any]] = {}  # the trainer's row and that of the demo's recorder
    for row in read_run(place).rows:
        by_step.setdefault(row["step"], {}).update(row)
    rows = [row for _, row in sorted(by_step.items()) if "expected_accuracy" in row]
    return summed_up(name, seed, rows, target)


def read_log(path: Path, target: float) -> dict[str, Any]:
    """The same from the log of a run of the study: settings, then one row per rollout."""
    with gzip.open(path, "rt") as file:
        settings, *rows = map(json.loads, file)
    settings = settings["settings"]
    made = {name: settings[name] for name in ("date", "commit", "hardware")}
    return summed_up(settings["arm"], settings["seed"], rows, target) | made


def print_table(record: dict[str, Any], console: Console) -> None:
    """One line per run, and the medians over seeds."""
    title = f"To {record['target']:.0%} accuracy, {record['hardware']}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    columns = ("run", "seed", "rollouts", "seconds", "seconds per rollout", "of it generation", "accuracy at the end")
    for column in columns:
        table.add_column(column, justify="right")
    for cell in record["cells"]:
        if "failure" in cell:
            table.add_row(cell["format"], str(cell["seed"]), "failed")
            continue
        to_target = ("never", "-") if cell["rollouts"] is None else (str(cell["rollouts"]), f"{cell['seconds']:.1f}")
        seconds = f"{cell['step_s']:.3f}", f"{cell['generate_s']:.3f}"
        table.add_row(cell["format"], str(cell["seed"]), *to_target, *seconds, f"{cell['final_accuracy']:.3f}")
    console.print(table)
    for name in dict.fromkeys(cell["format"] for cell in record["cells"]):
        cells = [cell for cell in record["cells"] if cell["format"] == name and cell.get("seconds") is not None]
        runs = sum(cell["format"] == name for cell in record["cells"])
        if cells:
            rollouts = statistics.median(cell["rollouts"] for cell in cells)
            seconds = sorted(cell["seconds"] for cell in cells)
            console.print(
                f"{name}: {len(cells)} of {runs} runs reached it, after {rollouts:.0f} rollouts and "
                f"{statistics.median(seconds):.1f} s ({seconds[0]:.1f}-{seconds[-1]:.1f})"
            )
        else:
            console.print(f"{name}: none of {runs} runs reached it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", nargs="+", choices=[*FORMATS], default=["bf16", "int8"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--target", type=float, default=0.75, help="expected accuracy; a run starts at 0.465")
    parser.add_argument("--logs", type=Path, nargs="+", help="read these runs instead of making any")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    record: dict[str, Any] = {
        "benchmark": "time_to_target",
        **provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"), measured="trl_qurl"),
        "target": arguments.target,
        "rollouts": arguments.rollouts,
        "cells": [],
    }
    if arguments.logs:
        record["cells"] = [read_log(path, arguments.target) for path in arguments.logs]
    with tempfile.TemporaryDirectory() as directory:
        for seed in [] if arguments.logs else arguments.seeds:
            for name in arguments.scheme:
                cell = measure(name, seed, arguments.rollouts, arguments.target, Path(directory))
                record["cells"].append(cell)
    path = write_record(record, arguments.output)
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
