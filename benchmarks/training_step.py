"""What does a whole training step cost, where does it go, and what do quantized rollouts change
about it?

    python benchmarks/training_step.py    # Qwen3-0.6B's shape: an hour on two cores
    python benchmarks/training_step.py --layers 2 --hidden 128 --vocabulary 500 --tokens 16

Real trainers with real engines on random weights, each in a separate process; all are there at
once, and are asked for steps in turns. A step is a sync, a rollout, its log-probabilities and its
update; its parts come from the log, its seconds from the clock. `--apart` lets one trainer finish
before the next is made, where memory holds no two of them. `plain TRL` is TRL's own trainer with
rollouts in BF16, `llm-compressor` is ours with a checkpoint by llm-compressor for every step,
`passes` are the forward and backward passes of an update and nothing else: what no trainer can
avoid.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from provenance import provenance, write_record
from rich import box
from rich.console import Console
from rich.table import Table
from shapes import Shape, add_shape_options, read_shape
from trainers import WAYS, Load, add_precision_options, build_trainer, trains_in_bf16
from transformers import TrainerCallback
from turns import Contestant, InForeground

PASSES = "passes"

PARTS = ("sync", "generate", "logps", "update")


class Gate(TrainerCallback):
    """
    Lets a trainer take one step whenever it is asked to, and times it.

    Args:
        updates: Optimizer updates that make a step.
    """

    def __init__(self, updates: int) -> None:
        self._updates = updates
        self._asked: Queue[None] = Queue()
        self._taken: Queue[float | BaseException] = Queue()
        self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait before the first update of a step."""
        if state.global_step % self._updates == 0:
            self._asked.get()
            self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step is over after its last update."""
        if state.global_step % self._updates == 0:
            self._taken.put(time.perf_counter() - self._started)

    def run(self, trainer: Any) -> None:
        """Train; a fault ends the step that was asked for."""
        try:
            trainer.train()
        except BaseException as error:
            self._taken.put(error)

    def step(self) -> float:
        """Seconds of the next step."""
        self._asked.put(None)
        taken = self._taken.get()
        if isinstance(taken, BaseException):
            raise taken
        return taken


def build(way: str, shape: Shape, load: Load, repeats: int, device: str) -> InForeground:
    """A trainer that answers what its next step cost; run in a separate process."""
    gate = Gate(load.updates)
    trainer = build_trainer(
        way, shape, load, device, [gate], max_steps=(repeats + 2) * load.updates
    )
    # Before the trainer's own clock of a step starts, or the wait for this trainer's turn would
    # belong to the step.
    trainer.callback_handler.callbacks.sort(key=lambda callback: callback is not gate)

    return InForeground(
        functools.partial(timed_step, gate, trainer, load.updates),
        functools.partial(gate.run, trainer),
    )


def timed_step(gate: Gate, trainer: Any, updates: int) -> dict[str, float]:
    """Seconds of the next step, and of its parts as far as the trainer logs them."""
    seen = len(trainer.state.log_history)
    seconds = {"step_s": gate.step()}
    while len(trainer.state.log_history) < seen + updates:  # it is logged just after the step
        time.sleep(0.01)
    rows = trainer.state.log_history[seen:]
    for part in PARTS:
        values = [row[f"time/{part}_s"] for row in rows if f"time/{part}_s" in row]
        if values:
            seconds[f"{part}_s"] = sum(values)
    return seconds


def build_passes(
    way: str, shape: Shape, load: Load, repeats: int, device: str
) -> Callable[[], dict[str, float]]:
    """Forward and backward passes over all completions, as a trainer computes them, without a
    trainer.
    """
    model: Any = shape.build(torch.float32, torch.device(device)).train()
    model.gradient_checkpointing_enable()
    tokens = torch.randint(
        shape.vocabulary, (load.train_batch, load.prompt + load.tokens), device=device
    )

    def step() -> dict[str, float]:
        started = time.perf_counter()
        for _ in range(load.completions // load.train_batch):
            with torch.autocast(device, torch.bfloat16, enabled=trains_in_bf16(device)):
                logits = model(tokens, logits_to_keep=load.tokens + 1).logits[:, :-1].float()
            targets = tokens[:, -load.tokens :, None]
            logits.log_softmax(-1).gather(-1, targets).mean().backward()
        model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return {"step_s": seconds, "update_s": seconds}

    return step


def measure(
    contestants: dict[str, Contestant], repeats: int, console: Console
) -> list[dict[str, Any]]:
    """One cell per way, with all of its steps; one that fails keeps its reason and the steps
    before.
    """
    cells: dict[str, dict[str, Any]] = {way: {"way": way, "steps": []} for way in contestants}
    for repeat in range(repeats + 1):
        for way, contestant in contestants.items():
            if "failure" in cells[way]:
                continue
            try:
                step = contestant.ask()
            except RuntimeError as error:
                cells[way]["failure"] = str(error)
                continue
            if repeat:  # the first warms up
                cells[way]["steps"].append(step)
            console.print(f"{way}: {step['step_s']:.1f} s")
    for cell in cells.values():
        for name in ("step_s", *(f"{part}_s" for part in PARTS)):
            values = [step[name] for step in cell["steps"] if name in step]
            if values:
                cell[name] = statistics.median(values)
    return list(cells.values())


def print_table(record: dict[str, Any], console: Console) -> None:
    """Seconds by way, and speed-up over our own trainer with BF16 rollouts."""
    table = Table(title=f"Seconds of a training step, {record['hardware']}", box=box.SIMPLE_HEAD)
    for column in ("rollouts", "step", "min-max", *PARTS, "sync share", "speed-up"):
        table.add_column(column, justify="right")
    base = next((cell.get("step_s") for cell in record["cells"] if cell["way"] == "bf16"), None)
    for cell in record["cells"]:
        if "step_s" not in cell:
            table.add_row(cell["way"], "-")
            continue
        steps = [step["step_s"] for step in cell["steps"]]
        parts = [f"{cell[f'{part}_s']:.2f}" if f"{part}_s" in cell else "-" for part in PARTS]
        share = f"{cell['sync_s'] / cell['step_s']:.1%}" if "sync_s" in cell else "-"
        gain = f"{base / cell['step_s']:.2f}" if base and cell["way"] != PASSES else "-"
        table.add_row(
            cell["way"],
            f"{cell['step_s']:.1f}",
            f"{min(steps):.1f}-{max(steps):.1f}",
            *parts,
            share,
            gain,
        )
    console.print(table)
    for cell in record["cells"]:
        if "failure" in cell:
            console.print(f"{cell['way']} failed: {cell['failure'][:300]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape_options(parser)
    add_precision_options(parser)
    parser.add_argument(
        "--ways", nargs="+", choices=[*WAYS, PASSES], default=["bf16", "int8", PASSES]
    )
    parser.add_argument("--completions", type=int, default=Load.completions)
    parser.add_argument("--tokens", type=int, default=Load.tokens)
    parser.add_argument("--train-batch", type=int, default=Load.train_batch)
    parser.add_argument("--updates", type=int, default=Load.updates)
    parser.add_argument(
        "--lora-rank",
        type=int,
        default=Load.lora_rank,
        help="train an adapter (default: the model)",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--apart", action="store_true", help="one way after the other instead of in turns"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    shape = read_shape(arguments)
    names = (
        "completions",
        "tokens",
        "train_batch",
        "updates",
        "lora_rank",
        "dtype",
        "engine_dtype",
    )
    load = Load(**{name: getattr(arguments, name) for name in names})
    console = Console(width=None if sys.stdout.isatty() else 140)
    record = {
        "benchmark": "training_step",
        **provenance(torch.device(arguments.device), measured="trl_qurl"),
    }
    record |= {"shape": asdict(shape), "load": asdict(load), "repeats": arguments.repeats}
    settings = (shape, load, arguments.repeats, arguments.device)
    record["in_turns"] = not arguments.apart
    record["trained_in_bf16"] = trains_in_bf16(arguments.device)
    record["cells"] = []
    for ways in [[way] for way in arguments.ways] if arguments.apart else [arguments.ways]:
        contestants = {
            way: Contestant(build_passes if way == PASSES else build, way, *settings)
            for way in ways
        }
        try:
            record["cells"] += measure(contestants, arguments.repeats, console)
        finally:
            for contestant in contestants.values():
                contestant.stop()
    path = write_record(record, arguments.output)
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
