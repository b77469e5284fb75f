"""How much memory do trainer and engine take, and how does it grow with the model, the batch and
the completions?

    python benchmarks/memory.py                # 60 to 280 million parameters, random weights: 15
    minutes on two cores python benchmarks/memory.py --layers 2 --hidden 128 --vocabulary 500
    --growth 1 2

Real trainers with real engines, each in a separate process: one rollout is made and learned from
twice (float32, AdamW). From a base, one size at a time is multiplied by each factor of `--growth`.
All figures are over what the imports take: resident memory on a CPU, torch's allocations on a GPU,
where the engine's cache of keys and values takes what `vllm_gpu_memory_utilization` gives it (on a
CPU one GiB, taken as it is used).
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from apart import measure_apart
from provenance import provenance, write_record
from quantizer import peak_bytes, reset_peak
from rich import box
from rich.console import Console
from rich.table import Table
from shapes import Shape
from trainers import WAYS, Load, add_precision_options, build_trainer

UPDATES = 2
SYNCS = 2


def measure(way: str, shape: Shape, load: Load, device: str) -> Iterator[dict[str, int]]:
    """Yields bytes: `parameters_bytes` of the policy, `engine_bytes` that starting the engine
    added, `sync_bytes` that a sync takes for as long as it lasts, `peak_bytes` of everything at
    once.
    """
    import vllm  # noqa: F401  before the count begins, as what it takes does not grow

    import trl_qurl.trainers.grpo  # noqa: F401

    where = torch.device(device)
    reset_peak(where)
    before = peak_bytes(where)
    trainer = build_trainer(way, shape, load, device, max_steps=UPDATES, num_iterations=UPDATES)
    parameters = sum(parameter.nbytes for parameter in trainer.model.parameters())
    reset_peak(where)
    built = peak_bytes(where)
    yield {"parameters_bytes": parameters, "engine_bytes": built - before - parameters}
    generation = trainer.vllm_generation
    generation.sync_weights()  # allocates what it keeps
    reset_peak(where)
    held = peak_bytes(where)
    for _ in range(SYNCS):
        generation.sync_weights()
    yield {"sync_bytes": peak_bytes(where) - held}
    trainer.train()
    yield {"peak_bytes": peak_bytes(where) - before}


def settings(base: Shape, load: Load, growth: list[int]) -> list[tuple[str, Shape, Load]]:
    """Return the sizes to measure: the base, and each size multiplied while the others stay."""
    found = [("base", base, load)]
    for factor in growth:
        if factor != 1:
            found += [
                (f"layers x {factor}", replace(base, layers=base.layers * factor), load),
                (
                    f"completions x {factor}",
                    base,
                    replace(load, completions=load.completions * factor),
                ),
                (
                    f"completions x {factor}, in one pass",
                    base,
                    replace(
                        load,
                        completions=load.completions * factor,
                        train_batch=load.train_batch * factor,
                    ),
                ),
                (f"tokens x {factor}", base, replace(load, tokens=load.tokens * factor)),
            ]
    return sorted(found, key=lambda setting: setting[0])


def print_table(record: dict[str, Any], console: Console) -> None:
    """One line per setting and way."""
    table = Table(
        title=f"Memory of a training step in GB, {record['hardware']}", box=box.SIMPLE_HEAD
    )
    table.add_column("setting")
    for column in ("rollouts", "parameters", "engine", "sync, for its time", "peak of a step"):
        table.add_column(column, justify="right")
    for cell in record["cells"]:
        names = ("parameters_bytes", "engine_bytes", "sync_bytes", "peak_bytes")
        figures = [f"{cell[name] / 1e9:.2f}" if name in cell else "-" for name in names]
        table.add_row(cell["setting"], cell["way"], *figures)
    console.print(table)
    for cell in record["cells"]:
        if "failure" in cell:
            console.print(f"{cell['setting']}, {cell['way']}: {cell['failure']}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--vocabulary", type=int, default=32000)
    add_precision_options(parser)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--growth", type=int, nargs="+", default=[1, 2, 4], help="factors; 1 is the base"
    )
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=["bf16", "int8"])
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # the engine's memory is this process's
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    base = Shape(arguments.layers, arguments.hidden, arguments.vocabulary)
    precision = {"dtype": arguments.dtype, "engine_dtype": arguments.engine_dtype}
    load = Load(
        arguments.completions, arguments.tokens, train_batch=arguments.completions, **precision
    )
    console = Console(width=None if sys.stdout.isatty() else 140)
    record: dict[str, Any] = {
        "benchmark": "memory",
        **provenance(torch.device(arguments.device), measured="trl_qurl"),
    }
    record["cells"] = []
    for name, shape, sizes in settings(base, load, arguments.growth):
        for way in arguments.ways:
            cell = measure_apart(measure, way, shape, sizes, arguments.device)
            record["cells"].append(
                {"setting": name, "way": way, **asdict(shape), **asdict(sizes), **cell}
            )
            path = write_record(record, arguments.output)  # what is known is kept
            console.print(f"{name}, {way}: {cell.get('peak_bytes', 0) / 1e9:.2f} GB")
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
