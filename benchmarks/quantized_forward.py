"""What does it cost to train in the quantized forward pass (`training_forward="quantized"`)?

    python benchmarks/quantized_forward.py                       # 190 million parameters: three minutes on two cores
    python benchmarks/quantized_forward.py --layers 2 --hidden 128 --vocabulary 500 --repeats 2

One model with random weights, as `trl-qurl bench` trains it: 32-bit weights, 16-bit autocast where the device has
instructions for it, TRL's output head, gradient checkpointing. Each format takes its turn in every repeat: it rounds
the weights, once as after an optimizer step, scores a batch, and makes one forward and backward pass over it. The
memory is that of the rounded weights, which are kept until the next optimizer step.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record
from quantizer import IGNORE, Shape
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from trl_qurl.cli.allocator import keep_freed_memory
from trl_qurl.lab.bench.training import half_precision, log_probabilities, prepare_policy, seconds
from trl_qurl.lab.bench.workload import Workload
from trl_qurl.lab.device import cpu_settings
from trl_qurl.quantization import SCHEMES, get_scheme, quantized_layer_names
from trl_qurl.quantization.fake_quantization import QuantizedLinear, quantized_forward

FULL_PRECISION = "full precision"


def one_turn(policy: PreTrainedModel, way: str, workload: Workload) -> dict[str, float]:
    """Seconds of rounding, scoring and a forward and backward pass, and the bytes that are kept."""
    device = policy.device
    is_16_bit = device.type == "cuda" or cpu_settings().get("bf16")
    length = workload.prompt_len + workload.completion_len

    def passed(action: Callable[[], Any]) -> float:
        started = seconds(device)
        action()
        return seconds(device) - started

    def score() -> None:
        with torch.no_grad():
            log_probabilities(policy, workload.train_batch, length, workload)

    def update() -> None:
        log_probabilities(policy, workload.train_batch, length, workload).mean().backward()

    names = set() if way == FULL_PRECISION else quantized_layer_names(policy, IGNORE, get_scheme(way))
    quantized = quantized_forward(policy, names, get_scheme(way)) if names else nullcontext()
    with quantized:
        layers = [module for module in policy.modules() if isinstance(module, QuantizedLinear)]
        for layer in layers:
            layer.round_again()
        dtype = half_precision() if is_16_bit else torch.float32
        rounding = passed(lambda: [layer.rounded_weight(dtype) for layer in layers]) if layers else 0.0
        kept = sum(layer.rounded_weight(dtype).nbytes for layer in layers)
        costs = {"rounding_s": rounding, "score_s": passed(score), "update_s": passed(update), "kept_bytes": kept}
        for layer in layers:
            layer.round_again()
    policy.zero_grad()
    return costs


def measure(policy: PreTrainedModel, workload: Workload, schemes: list[str], repeats: int) -> list[dict[str, Any]]:
    """Medians by way, of turns; the first of each warms up."""
    ways = [FULL_PRECISION, *schemes]
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way in ways:
            turns[way].append(one_turn(policy, way, workload))
    cells = []
    for way, taken in turns.items():
        cell: dict[str, Any] = {"way": way, "turns": taken[1:]}
        cells.append(cell | {name: statistics.median(turn[name] for turn in taken[1:]) for name in taken[0]})
    return cells


def print_table(record: dict[str, Any], console: Console) -> None:
    """Seconds, and how many times those of full precision a rounding, a scoring and an updating pass take."""
    table = Table(title=f"Quantized forward pass, {record['hardware']}", box=box.SIMPLE_HEAD)
    for column in ("forward pass", "rounding s", "score s", "update s", "all three", "kept MB"):
        table.add_column(column, justify="right")
    parts = ("rounding_s", "score_s", "update_s")
    whole = sum(record["cells"][0][part] for part in parts)
    for cell in record["cells"]:
        share = sum(cell[part] for part in parts) / whole
        figures = (*(f"{cell[part]:.3f}" for part in parts), f"{share:.2f}", f"{cell['kept_bytes'] / 1e6:.0f}")
        table.add_row(cell["way"], *figures)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--schemes", choices=[*SCHEMES], nargs="+", default=["int8", "fp8", "w4a16"])
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a prompt, and of a completion")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()  # as our commands do
    device = torch.device(arguments.device)
    shape = Shape(arguments.layers, arguments.hidden, arguments.vocabulary)
    record = {"benchmark": "quantized_forward", **provenance(device, measured="trl_qurl")}
    count = arguments.completions
    workload = Workload(arguments.tokens, arguments.tokens, count, count, train_batch=count, updates=1)
    record |= {"shape": asdict(shape), "workload": asdict(workload), "repeats": arguments.repeats}
    policy = shape.build(torch.float32, device)
    prepare_policy(policy, workload)
    record["cells"] = measure(policy, workload, arguments.schemes, arguments.repeats)
    path = write_record(record, arguments.output)
    console = Console(width=None if sys.stdout.isatty() else 140)
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
