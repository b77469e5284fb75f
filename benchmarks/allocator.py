"""What does it save on a CPU that glibc keeps freed memory, and what does it cost?

    python benchmarks/allocator.py                    # 190 million parameters, random weights: 3 minutes on two cores
    python benchmarks/allocator.py --layers 2 --hidden 128 --vocabulary 500 --completions 64 --tokens 16

One real trainer with a real engine takes steps (bfloat16 where the CPU has it) under glibc's defaults and under the
settings that docs/performance.md recommends, in turns. Each turn is two steps, of which the second counts: the first
has the page faults of a heap that has just changed. The peak is the resident set's, of both steps.
"""

import argparse
import ctypes
import os
import resource
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record
from quantizer import Shape, peak_bytes, reset_peak
from rich import box
from rich.console import Console
from rich.table import Table
from trainers import WAYS, Load
from training_step import PARTS, build
from turns import Contestant, InForeground

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
LARGEST = 2**31 - 1  # maximum that mallopt accepts

# Where glibc's own thresholds settle once a block of 32 MB was freed: they follow the sizes of what is freed.
SETTINGS = {"returned": (32 * 2**20, 64 * 2**20), "kept": (LARGEST, LARGEST)}


def build_alternating(way: str, shape: Shape, load: Load, repeats: int) -> InForeground:
    """A trainer that takes two steps with freed memory returned or kept, and answers what the second one cost."""
    inner = build(way, shape, load, 4 * repeats + 2, "cpu")
    libc, cpu = ctypes.CDLL(None), torch.device("cpu")

    def step(setting: str) -> dict[str, float]:
        threshold, trim = SETTINGS[setting]
        libc.mallopt(M_MMAP_THRESHOLD, threshold)
        libc.mallopt(M_TRIM_THRESHOLD, trim)
        if setting == "returned":
            libc.malloc_trim(0)
        reset_peak(cpu)
        inner.answer()
        before = resource.getrusage(resource.RUSAGE_SELF)
        cost = inner.answer()
        after = resource.getrusage(resource.RUSAGE_SELF)
        return cost | {
            "page_faults": after.ru_minflt - before.ru_minflt,
            "user_s": after.ru_utime - before.ru_utime,
            "system_s": after.ru_stime - before.ru_stime,
            "peak_bytes": peak_bytes(cpu),
        }

    return InForeground(step, inner.run)


def measure(contestant: Contestant, repeats: int, console: Console) -> Iterator[list[dict[str, Any]]]:
    """One cell per setting, with all of its steps so far and their medians, after each repeat."""
    cells: dict[str, dict[str, Any]] = {setting: {"memory": setting, "steps": []} for setting in SETTINGS}
    for _ in range(repeats):
        for setting, cell in cells.items():
            cell["steps"].append(step := contestant.ask(setting))
            console.print(f"{setting}: {step['step_s']:.1f} s, {step['page_faults']} page faults")
            cell |= {name: statistics.median(step[name] for step in cell["steps"]) for name in step}
        yield list(cells.values())


def print_table(record: dict[str, Any], console: Console) -> None:
    """One line per setting."""
    table = Table(title=f"A step, {record['hardware']}, {record['way']}", box=box.SIMPLE_HEAD)
    for column in ("freed memory", "step s", "min-max", *PARTS, "user s", "system s", "page faults", "peak GB"):
        table.add_column(column, justify="right")
    for cell in record["cells"]:
        seconds = [step["step_s"] for step in cell["steps"]]
        parts = [f"{cell[name]:.2f}" for name in (*(f"{part}_s" for part in PARTS), "user_s", "system_s")]
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        faults, peak = f"{cell['page_faults']:.0f}", f"{cell['peak_bytes'] / 1e9:.2f}"
        table.add_row(cell["memory"], f"{cell['step_s']:.2f}", spread, *parts, faults, peak)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--way", choices=[*WAYS], default="int8")
    parser.add_argument("--completions", type=int, default=Load.completions)
    parser.add_argument("--tokens", type=int, default=Load.tokens)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="on a GPU malloc is left as it is")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    shape = Shape(arguments.layers, arguments.hidden, arguments.vocabulary)
    load = Load(arguments.completions, arguments.tokens, train_batch=arguments.completions)
    console = Console(width=None if sys.stdout.isatty() else 140)
    record = {"benchmark": "allocator", **provenance(torch.device("cpu"), measured="trl_qurl")}
    record |= {"way": arguments.way, "shape": asdict(shape), "load": asdict(load), "repeats": arguments.repeats}
    contestant = Contestant(build_alternating, arguments.way, shape, load, arguments.repeats)
    try:
        for record["cells"] in measure(contestant, arguments.repeats, console):
            path = write_record(record, arguments.output)  # what is known is kept
    finally:
        contestant.stop()
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
