"""What does a step take with plain TRL, and with ours? The rival generates with transformers.

    python benchmarks/rival.py MODEL   # 64 and 256 tokens: 40 minutes on two idle cores
    python benchmarks/rival.py MODEL --tokens 512 --ways bf16 int8
    python benchmarks/rival.py --shape tiny --completions 8 --tokens 16 --repeats 1

MODEL is the directory of a model. Each way has the settings that its users get: float32 weights,
bfloat16 autocast, one update per rollout, and vLLM compiles. A start is everything from a new
process to the first step, alone on the machine: first with empty caches of vLLM and torch, then
with what that start left. The trainers that remain are asked for steps in turns. *other* is the
step without generation and sync: log-probabilities, update, and all else. Peak memory is that of
the process, or of torch's allocations on a GPU.
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from provenance import peak_bytes, provenance, write_record
from rich import box
from rich.console import Console
from rich.table import Table
from shapes import Shape, add_shape_options, read_shape
from trainers import TRANSFORMERS, WAYS, Load, build_trainer, trains_in_bf16
from training_step import Gate, measure, timed_step
from turns import Contestant, InForeground

from trl_qurl.lab.device import keep_freed_memory

AS_USERS_HAVE_IT = {"vllm_engine_kwargs": {}, "sync_check_interval": 16}


def build(
    way: str, model: Shape | str, load: Load, steps: int, device: str, asked: float
) -> InForeground:
    """A trainer that answers what its start took, or its next step; run in a separate process."""
    keep_freed_memory()  # as `trl-qurl grpo` does; the rival gets it as well
    gate = Gate(load.updates)
    further = {} if way == TRANSFORMERS else AS_USERS_HAVE_IT
    trainer = build_trainer(way, model, load, device, [gate], max_steps=steps, **further)
    trainer.callback_handler.callbacks.sort(key=lambda callback: callback is not gate)
    start_s = time.time() - asked

    def answer(question: str = "step") -> dict[str, float]:
        if question == "start":
            return {"start_s": start_s}
        return timed_step(gate, trainer, load.updates) | {
            "peak_bytes": peak_bytes(torch.device(device))
        }

    return InForeground(answer, functools.partial(gate.run, trainer))


def start(
    way: str, model: Shape | str, load: Load, steps: int, device: str
) -> tuple[Contestant, float | None]:
    """A contestant that waits for its first step, and the
    seconds that took; `None` if it failed.
    """
    contestant = Contestant(build, way, model, load, steps, device, time.time())
    try:
        return contestant, contestant.ask("start")["start_s"]
    except RuntimeError:
        return contestant, None  # `measure` records why


def compare(
    model: Shape | str, load: Load, arguments: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """Start the trainers one after another, then take steps in turns; one cell per way."""
    settings = (model, load, arguments.repeats + 2, arguments.device)
    contestants, starts = {}, {}
    try:
        with tempfile.TemporaryDirectory() as cache:
            os.environ |= {"VLLM_CACHE_ROOT": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
            for way in arguments.ways:
                contestants[way], first_s = start(way, *settings)
                contestants[way].stop()
                contestants[way], later_s = start(way, *settings)
                starts[way] = {"first_start_s": first_s, "later_start_s": later_s}
                console.print(
                    f"{way}: started in {first_s or 0:.0f} s, then in {later_s or 0:.0f} s"
                )
            cells = measure(contestants, arguments.repeats, console)
    finally:
        for contestant in contestants.values():
            contestant.stop()
    for cell in cells:
        cell |= {"tokens": load.tokens, **starts[cell["way"]]}
        if cell["steps"]:
            cell["peak_bytes"] = max(step["peak_bytes"] for step in cell["steps"])
            cell["other_s"] = statistics.median(map(_other, cell["steps"]))
    return cells


def _other(step: dict[str, float]) -> float:
    """Seconds of a step without generation and sync."""
    return step["step_s"] - step["generate_s"] - step.get("sync_s", 0.0)


def print_table(record: dict[str, Any], console: Console) -> None:
    """Seconds by way and length, and how often our step fits into the rival's."""
    table = Table(title=f"Seconds of a step, {record['hardware']}", box=box.SIMPLE_HEAD)
    for column in (
        "tokens",
        "rollouts",
        "start",
        "later",
        "step",
        "min-max",
        "sync",
        "generate",
        "other",
        "GB",
        "times",
    ):
        table.add_column(column, justify="right")
    for cell in record["cells"]:
        if not cell["steps"]:
            table.add_row(str(cell["tokens"]), cell["way"], "-")
            console.print(f"{cell['way']} failed: {cell['failure'][:300]}")
            continue
        steps = [step["step_s"] for step in cell["steps"]]
        rival = [
            one["step_s"]
            for one in record["cells"]
            if one["tokens"] == cell["tokens"] and "step_s" in one
        ][0]
        table.add_row(
            str(cell["tokens"]),
            cell["way"],
            f"{cell['first_start_s']:.0f}",
            f"{cell['later_start_s']:.0f}",
            f"{cell['step_s']:.1f}",
            f"{min(steps):.1f}-{max(steps):.1f}",
            f"{cell['sync_s']:.2f}" if "sync_s" in cell else "-",
            f"{cell['generate_s']:.1f}",
            f"{cell['other_s']:.1f}",
            f"{cell['peak_bytes'] / 1e9:.1f}",
            f"{rival / cell['step_s']:.2f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", help="directory of a model (default: random weights of --shape)"
    )
    add_shape_options(parser)
    parser.add_argument(
        "--ways", nargs="+", choices=[*WAYS], default=[TRANSFORMERS, "bf16", "int8"]
    )
    parser.add_argument("--completions", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument(
        "--prompt", type=int, default=400, help="characters of a prompt (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.model and not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"{arguments.model} is not the directory of a model: it has no config.json.")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    load = Load(completions=arguments.completions, prompt=arguments.prompt)
    console = Console(width=None if sys.stdout.isatty() else 140)
    record = {
        "benchmark": "rival",
        **provenance(torch.device(arguments.device), measured="trl_qurl"),
    }
    record |= {
        "model": Path(arguments.model).name if arguments.model else asdict(read_shape(arguments))
    }
    record |= {"load": asdict(load), "repeats": arguments.repeats}
    record["trained_in_bf16"] = trains_in_bf16(arguments.device)
    record["cells"] = []
    for tokens in arguments.tokens:
        model = arguments.model or read_shape(arguments)
        record["cells"] += compare(model, replace(load, tokens=tokens), arguments, console)
        path = write_record(record, arguments.output)
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
