"""Has anything become slower, larger or less exact? Measures a few figures and compares them with
stored ones.

    python benchmarks/baselines.py                       # `make baselines`: about ten minutes
    python benchmarks/baselines.py --model DIRECTORY     # also a real model's mismatch
    python benchmarks/baselines.py --parts startup demo  # only these
    python benchmarks/baselines.py --store               # accept what is measured now

No figure is in seconds: all are counts, accuracies, losses, or ratios of things measured in one
run, so that another machine of the same kind gives about the same. `baselines/` has a file for each
kind: a GPU's name, or what a CPU computes with. On a kind without a file, one is written. The exit
status is 1 if a figure is worse than its limit.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from provenance import kind_of_machine, provenance
from rich import box
from rich.console import Console
from rich.table import Table
from trainers import TRANSFORMERS, trains_in_bf16

from trl_qurl.lab.runs import read_run

HERE = Path(__file__).parent
QURL = (sys.executable, "-m", "trl_qurl")
FEW = ("--limit", "8", "--samples", "2", "--max-tokens", "48")  # answers
SMALL = ("--layers", "4", "--hidden", "512", "--vocabulary", "8000")


class Figure(NamedTuple):
    """A measured figure."""

    meaning: str
    room: float  # above 1: at most this times the stored value; below 1: at least


FIGURES = {
    "startup": Figure("seconds of `trl-qurl --help` / of `import torch`", 2.0),
    "decode": Figure("tokens per second, INT8 / unquantized", 0.75),
    "sync": Figure("seconds of a sync, INT8 / unquantized", 1.6),
    "sync_bytes": Figure("bytes of a sync, INT8 / unquantized", 1.01),
    "peak_memory": Figure("peak memory of a step, INT8 / unquantized", 1.1),
    "rival_step": Figure("seconds of a step, INT8 / TRL with transformers", 1.4),
    "rival_generation": Figure("seconds of generation and sync, INT8 / TRL with transformers", 1.4),
    "demo_kl": Figure("KL of the demo's rollouts, median, 1e-3 nats", 1.5),
    "demo_corrected": Figure("share of its errors that the demo corrects", 0.8),
    "demo_lines": Figure("lines that the demo prints", 1.2),
    "model_kl": Figure("KL of a real model's INT8 rollouts before training, 1e-3 nats", 2.0),
}

Found = dict[str, float]


def run(*command: str | Path) -> str:
    """Return the standard output of a command; fail with its
    other output if it does not succeed.
    """
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        raise SystemExit(
            f"This failed with exit status {done.returncode}: {' '.join(map(str, command))}"
        )
    return done.stdout


def precision() -> list[str]:
    """Unquantized engines compute in 16 bits, except on CPUs
    that would emulate them, in minutes.
    """
    return (
        []
        if trains_in_bf16("cuda" if torch.cuda.is_available() else "cpu")
        else ["--engine-dtype", "float32"]
    )


def record(directory: Path, script: str, *arguments: str) -> dict[str, Any]:
    """Run another benchmark, and return its record."""
    output = directory / f"{script}.json"
    run(sys.executable, HERE / f"{script}.py", *SMALL, *arguments, "--output", output)
    return json.loads(output.read_text())


def cell(record: dict[str, Any], **wanted: Any) -> dict[str, Any]:
    """The one cell with these values."""
    [found] = [cell for cell in record["cells"] if wanted.items() <= cell.items()]
    return found


def measure_startup(directory: Path) -> Found:
    """Alternating, the fastest of five each: what else the machine does only adds."""
    commands = {"help": (*QURL, "--help"), "torch": (sys.executable, "-c", "import torch")}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for name, command in [*commands.items()] * 5:
        started = time.perf_counter()
        run(*command)
        seconds[name].append(time.perf_counter() - started)
    return {"startup": min(seconds["help"]) / min(seconds["torch"])}


def measure_bench(directory: Path) -> Found:
    engine: dict[str, Any] = {"enforce_eager": not torch.cuda.is_available()}
    if precision():
        engine["dtype"] = "float32"
    load = ("--batch", "16", "--prompt-len", "28", "--completion-len", "64")
    options = ("--scheme", "int8", "--minutes", "1", "--engine-kwargs", json.dumps(engine))
    steps = record(directory, "shapes", *load, *options)["steps"]
    seconds = {
        name: statistics.median(step["rollout"] for step in taken) for name, taken in steps.items()
    }
    peaks = {name: max(step["peak"] for step in taken) for name, taken in steps.items()}
    return {
        "decode": seconds["none"] / seconds["int8"],
        "peak_memory": peaks["int8"] / peaks["none"],
    }


def measure_sync(directory: Path) -> Found:
    found = record(directory, "weight_sync", "--ways", "bf16-stream", "int8-stream", *precision())
    int8, full = (cell(found, scheme=scheme) for scheme in ("int8", None))
    return {"sync": int8["sync_s"] / full["sync_s"], "sync_bytes": int8["bytes"] / full["bytes"]}


def measure_rival(directory: Path) -> Found:
    options = (
        "--ways",
        TRANSFORMERS,
        "int8",
        "--completions",
        "16",
        "--tokens",
        "64",
        "--repeats",
        "2",
    )
    found = record(directory, "rival", *options)
    rival, ours = (cell(found, way=way) for way in (TRANSFORMERS, "int8"))
    return {
        "rival_step": ours["step_s"] / rival["step_s"],
        "rival_generation": (ours["generate_s"] + ours["sync_s"]) / rival["generate_s"],
    }


def measure_demo(directory: Path) -> Found:
    printed = run(*QURL, "demo", "--output-dir", directory / "demo")
    kl = [value for _, value in read_run(directory / "demo").series("mismatch/kl_k3")]
    [accuracies] = re.findall(r"([\d.]+)% before and ([\d.]+)% after", printed)
    before, after = (float(percent) / 100 for percent in accuracies)
    return {
        "demo_kl": 1e3 * statistics.median(kl),
        "demo_corrected": (after - before) / (1 - before),
        "demo_lines": len(printed.splitlines()),
    }


def measure_model(directory: Path, model: str) -> Found:
    output = directory / "mismatch.json"
    run(*QURL, "mismatch", model, "--scheme", "int8", *FEW, "--output", output)
    return {"model_kl": 1e3 * json.loads(output.read_text())["formats"]["int8"]["kl_k3"]["value"]}


PARTS: dict[str, Callable[[Path], Found]] = {
    "startup": measure_startup,
    "bench": measure_bench,
    "sync": measure_sync,
    "rival": measure_rival,
    "demo": measure_demo,
}


def is_worse(value: float, stored: float, room: float) -> bool:
    """Return whether a figure exceeds its limit."""
    return value > stored * room if room > 1 else value < stored * room


def compare(found: Found, stored: Found, console: Console) -> list[str]:
    """Print one line per figure; return the names of those that are worse than their limits."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("figure")
    for column in ("stored", "now", "limit", ""):
        table.add_column(column, justify="right", no_wrap=True)
    worse = []
    for name, value in found.items():
        meaning, room = FIGURES[name]
        if name not in stored:
            table.add_row(meaning, "-", f"{value:.3g}", "-", "new")
            continue
        bad = is_worse(value, stored[name], room)
        worse += [name] * bad
        limit = f"{'≤' if room > 1 else '≥'} {stored[name] * room:.3g}"
        table.add_row(
            meaning, f"{stored[name]:.3g}", f"{value:.3g}", limit, "WORSE" if bad else "ok"
        )
    console.print(table)
    return worse


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=[*PARTS, "model"], help="measure only these (default: all)"
    )
    parser.add_argument("--model", help="directory of a chat model, for the figure of a real one")
    parser.add_argument("--store", action="store_true", help="store the figures, better or worse")
    parser.add_argument(
        "--baselines", type=Path, help="file of stored figures (default: this kind of machine's)"
    )
    arguments = parser.parse_args()
    if arguments.model is None and "model" in (arguments.parts or ()):
        parser.error("--parts model needs a model: add --model DIRECTORY")
    if arguments.model and not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"{arguments.model} is not the directory of a model: it has no config.json.")
    parts = dict(PARTS) | (
        {"model": lambda directory: measure_model(directory, arguments.model)}
        if arguments.model
        else {}
    )
    kind = kind_of_machine()
    path = arguments.baselines or HERE / "baselines" / f"{kind}.json"
    known = json.loads(path.read_text()) if path.exists() else {"figures": {}}
    console = Console(width=None if sys.stdout.isatty() else 120)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about, found = provenance(device, measured="trl_qurl"), {}
    with tempfile.TemporaryDirectory() as directory:
        for name in arguments.parts or parts:
            started = time.perf_counter()
            found |= parts[name](Path(directory))
            console.print(f"{name}: {time.perf_counter() - started:.0f} s")
    worse = compare(found, known["figures"], console)
    if arguments.store or not path.exists():
        path.parent.mkdir(exist_ok=True)
        tmp = path.with_suffix(".tmp")
        tmp.write_text(json.dumps(about | {"figures": known["figures"] | found}, indent=2) + "\n")
        tmp.replace(path)
        console.print(f"Stored for {kind}: {path}", soft_wrap=True)
        return 0
    if worse:
        console.print(
            f"Worse than its limit on {kind}: {', '.join(worse)}. If that is intended, store it: "
            "--store"
        )
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
