"""What does it save to send only a LoRA adapter, and what does the engine lose by computing with
it?

    python benchmarks/adapter_sync.py                            # 190 million parameters: some
    minutes on two cores python benchmarks/adapter_sync.py --layers 2 --hidden 128 --vocabulary 500
    --batches 2 --tokens 8 --repeats 2

Two real trainers with real engines on the same random weights, with an adapter of rank 16 on all
linear layers, each in a separate process, asked in turns: *merged* sends the layers with the
adapter merged into them (`weight_sync= "stream"`), *adapter* the adapter alone
(`weight_sync="adapter"`). Syncs are without checks; seconds, bytes, and the seconds of rounding
(with gathering) are the trainer's own metrics. Rollouts are those of the engine.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from provenance import provenance, write_record
from quantizer import Shape
from rich import box
from rich.console import Console
from rich.table import Table
from trainers import Load, build_trainer, prompt
from turns import Contestant

from trl_qurl.quantization import SCHEMES

WAYS = {"merged": "stream", "adapter": "adapter"}
TARGET_SECONDS = 0.1
TARGET_SHARE = 1 / 20  # of the merged sync's bytes


def build(
    way: str, shape: Shape, largest: Load, device: str, scheme: str, rank: int
) -> Callable[..., Any]:
    """A trainer that answers what a sync costs, or how long a batch takes; run in a separate
    process.
    """
    adapter = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    settings = {"rollout_quantization": scheme, "weight_sync": WAYS[way]}
    trainer = build_trainer("int8", shape, largest, device, peft_config=adapter, **settings)
    generation = trainer.vllm_generation
    for name, parameter in trainer.model.named_parameters():
        if ".lora_B." in name:  # as after some steps: a new one is zero
            torch.nn.init.normal_(parameter, std=1e-3)

    def answer(batch: int = 0, tokens: int = 0) -> Any:
        if not batch:
            generation.cost.take()
            generation.sync_weights()
            cost = generation.cost.take()
            return {"sync_s": cost.sync_s, "quantize_s": cost.quantize_s, "bytes": cost.sent_bytes}
        from vllm import SamplingParams

        prompts = [
            trainer.processing_class(prompt(largest.prompt, number))["input_ids"]
            for number in range(batch)
        ]
        params = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True)
        generation.llm.reset_prefix_cache()
        started = time.perf_counter()
        generation.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        return time.perf_counter() - started

    return answer


def measure(
    contestants: dict[str, Contestant], batches: list[int], tokens: int, repeats: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Syncs by way, then rollouts by way and batch, each in turns; the first of each warms up."""
    syncs: dict[str, list[dict[str, Any]]] = {way: [] for way in contestants}
    for _ in range(repeats + 1):
        for way, contestant in contestants.items():
            syncs[way].append(contestant.ask())
    cells = []
    for way, costs in syncs.items():
        seconds = [cost["sync_s"] for cost in costs[1:]]
        quantize = statistics.median(cost["quantize_s"] for cost in costs[1:])
        sync = {"sync_s": statistics.median(seconds), "seconds": seconds, "quantize_s": quantize}
        cells.append({"way": way, **sync, "bytes": costs[-1]["bytes"]})
    rollouts = []
    for batch in batches:
        found: dict[str, list[float]] = {way: [] for way in contestants}
        for _ in range(repeats + 1):
            for way, contestant in contestants.items():
                found[way].append(contestant.ask(batch, tokens))
        for way, taken in found.items():
            rate = batch * tokens / statistics.median(taken[1:])
            rollouts.append(
                {"way": way, "batch": batch, "seconds": taken[1:], "tokens_per_s": rate}
            )
    return cells, rollouts


def print_tables(record: dict[str, Any], console: Console) -> None:
    """Syncs, whether they meet the goals, and rollouts."""
    table = Table(title=f"Syncs, {record['hardware']}", box=box.SIMPLE_HEAD)
    for column in ("way", "MB", "sync s", "min-max", "of it quantize s"):
        table.add_column(column, justify="right")
    for cell in record["cells"]:
        span = f"{min(cell['seconds']):.3f}-{max(cell['seconds']):.3f}"
        sizes = (
            f"{cell['bytes'] / 1e6:.1f}",
            f"{cell['sync_s']:.3f}",
            span,
            f"{cell['quantize_s']:.3f}",
        )
        table.add_row(cell["way"], *sizes)
    console.print(table)
    merged, adapter = record["cells"]
    share = adapter["bytes"] / merged["bytes"]
    for goal, met in (
        (
            f"{adapter['sync_s']:.3f} s, at most {TARGET_SECONDS}",
            adapter["sync_s"] <= TARGET_SECONDS,
        ),
        (
            f"1/{1 / share:.1f} of the bytes, at most 1/{1 / TARGET_SHARE:.0f}",
            share <= TARGET_SHARE,
        ),
    ):
        console.print(f"An adapter's sync: {goal}: {'met' if met else 'missed'}")
    table = Table(title=f"Tokens per second, {record['tokens']} tokens", box=box.SIMPLE_HEAD)
    for column in ("batch", *WAYS):
        table.add_column(column, justify="right")
    for batch in dict.fromkeys(cell["batch"] for cell in record["rollouts"]):
        rates = [cell["tokens_per_s"] for cell in record["rollouts"] if cell["batch"] == batch]
        table.add_row(str(batch), *(f"{rate:.1f}" for rate in rates))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--scheme", choices=[*SCHEMES], default="int8")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    shape = Shape(arguments.layers, arguments.hidden, arguments.vocabulary)
    record = {
        "benchmark": "adapter_sync",
        **provenance(torch.device(arguments.device), measured="trl_qurl"),
    }
    record |= {"shape": asdict(shape), "repeats": arguments.repeats, "tokens": arguments.tokens}
    record |= {"scheme": arguments.scheme, "rank": arguments.rank}
    batch = max(arguments.batches, default=8)
    largest = Load(completions=batch, tokens=arguments.tokens, train_batch=batch)
    given = (shape, largest, arguments.device, arguments.scheme, arguments.rank)
    contestants = {way: Contestant(build, way, *given) for way in WAYS}
    try:
        measured = measure(contestants, arguments.batches, arguments.tokens, arguments.repeats)
    finally:
        for contestant in contestants.values():
            contestant.stop()
    record["cells"], record["rollouts"] = measured
    path = write_record(record, arguments.output)
    console = Console(width=None if sys.stdout.isatty() else 140)
    print_tables(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
