"""Does `trl-qurl bench` say what a step will cost? Its predictions beside measured steps.

    python benchmarks/predictions.py                     # six settings of a small Qwen3: at most an hour on two cores
    python benchmarks/predictions.py --layers 2 --hidden 128 --vocabulary 500 --settings 1 --repeats 1

For each setting, `trl-qurl bench` predicts the step with 16-bit and with INT8 rollouts; then two real trainers
take real steps in turns. The error is predicted over measured, less one. (The trainers' steps contain rewards, logging
and what else a trainer does, which the prediction leaves out.)
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record
from quantizer import Shape
from rich import box
from rich.console import Console
from rich.table import Table
from trainers import Load
from training_step import build, measure
from turns import Contestant

SETTINGS = [
    Load(completions=8, tokens=32, prompt=32, train_batch=8, updates=1),
    Load(completions=8, tokens=128, prompt=32, train_batch=8, updates=1),
    Load(completions=16, tokens=64, prompt=64, train_batch=4, updates=4),
    Load(completions=32, tokens=32, prompt=32, train_batch=8, updates=2),
    Load(completions=32, tokens=128, prompt=64, train_batch=8, updates=4),
    Load(completions=64, tokens=64, prompt=128, train_batch=8, updates=2),
]
WAYS = {"bf16": "none", "int8": "int8"}
"""Our trainer's name of a format, and the bench's."""


def predict(shape: Shape, load: Load) -> dict[str, Any]:
    """What the command says, in a process of its own as a user runs it."""
    with tempfile.TemporaryDirectory() as directory:
        shape.build(torch.float32, torch.device("meta")).config.save_pretrained(directory)
        output = Path(directory, "bench.json")
        command = [sys.executable, "-m", "trl_qurl", "bench", directory, "--schemes", "int8", "-o", output]
        command += ["--prompt-len", load.prompt, "--completion-len", load.tokens, "--batch", load.completions]
        command += ["--generations", min(8, load.completions), "--train-batch", load.train_batch]
        command += ["--updates", load.updates]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        return json.loads(output.read_text())


def compare(shape: Shape, load: Load, repeats: int, device: str, console: Console) -> dict[str, Any]:
    """Prediction, measurement and error of one setting."""
    said = predict(shape, load)
    contestants = {way: Contestant(build, way, shape, load, repeats, device) for way in WAYS}
    try:
        cells = {cell["way"]: cell for cell in measure(contestants, repeats, console)}
    finally:
        for contestant in contestants.values():
            contestant.stop()
    result: dict[str, Any] = {"load": asdict(load), "bench_s": said["seconds"], "cells": list(cells.values())}
    for way, name in WAYS.items():
        step = said["baseline"] if name == "none" else said["comparisons"][name]["step"]
        predicted = {part: seconds[1] for part, seconds in step.items()}
        measured = cells[way]["step_s"]
        result[way] = {"predicted": predicted, "predicted_s": sum(predicted.values()), "measured_s": measured}
    ratio = result["bf16"]["measured_s"] / result["int8"]["measured_s"]
    return result | {"predicted_speedup": said["comparisons"]["int8"]["speedup"], "measured_speedup": ratio}


def print_table(record: dict[str, Any], console: Console) -> None:
    """One line per setting."""
    table = Table(title=f"Predicted and measured steps, {record['hardware']}", box=box.SIMPLE_HEAD)
    for column in ("completions", "prompt", "tokens", "updates"):
        table.add_column(column, justify="right")
    for way in WAYS:
        table.add_column(f"{way}: predicted / measured s", justify="right")
        table.add_column("error", justify="right")
    table.add_column("speed-up: predicted / measured", justify="right")
    for setting in record["settings"]:
        load = setting["load"]
        row = [str(load[name]) for name in ("completions", "prompt", "tokens", "updates")]
        for way in WAYS:
            predicted, measured = setting[way]["predicted_s"], setting[way]["measured_s"]
            row += [f"{predicted:.2f} / {measured:.2f}", f"{predicted / measured - 1:+.0%}"]
        low, middle, high = setting["predicted_speedup"]
        row.append(f"{middle:.2f} ({low:.2f}-{high:.2f}) / {setting['measured_speedup']:.2f}")
        table.add_row(*row)
    console.print(table)
    errors = [abs(s[way]["predicted_s"] / s[way]["measured_s"] - 1) for s in record["settings"] for way in WAYS]
    console.print(f"Median error of a step: {statistics.median(errors):.0%}, largest {max(errors):.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="only the first N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    shape = Shape(arguments.layers, arguments.hidden, arguments.vocabulary)
    console = Console(width=None if sys.stdout.isatty() else 140)
    record: dict[str, Any] = {
        "benchmark": "predictions",
        **provenance(torch.device(arguments.device), measured="trl_qurl"),
        "shape": asdict(shape),
        "repeats": arguments.repeats,
    }
    record["settings"] = []
    for load in SETTINGS[: arguments.settings]:
        record["settings"].append(compare(shape, load, arguments.repeats, arguments.device, console))
        path = write_record(record, arguments.output)  # what is known is kept
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
