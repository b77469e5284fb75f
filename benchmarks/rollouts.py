"""How fast are rollouts of each format, in the engine alone and as a trainer gets them?

    python benchmarks/rollouts.py                                # Qwen3-0.6B's shape: half an hour
    on two cores python benchmarks/rollouts.py --batches 1 8 64 --tokens 32 128 python
    benchmarks/rollouts.py --layers 2 --hidden 128 --vocabulary 500 --batches 2 --tokens 8 --repeats
    3

Each format has a real trainer with a real engine and random weights, in a separate process; all are
there at once, and are asked in turns. *engine* is `LLM.generate` of vLLM itself; *trainer* the call
by which the trainer generates, with everything that TRL and we add to it. Both sample at
temperature 1 and return log-probabilities. `plain TRL` is TRL's own trainer with rollouts in BF16.
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
from provenance import provenance, write_record
from rich import box
from rich.console import Console
from rich.table import Table
from shapes import Shape, add_shape_options, read_shape
from trainers import WAYS, Load, add_precision_options, build_trainer, prompt
from turns import Contestant

ENGINE, TRAINER = "engine", "trainer"


def build(
    way: str, model: Shape | str, largest: Load, device: str
) -> Callable[[str, int, int], float]:
    """A trainer that answers how long a batch takes; run in a separate process. A real model is
    compiled.
    """
    trainer = build_trainer(
        way,
        model,
        largest,
        device,
        **({"vllm_engine_kwargs": {}} if isinstance(model, str) else {}),
    )
    generation = trainer.vllm_generation
    generation.sync_weights()

    def seconds(place: str, batch: int, tokens: int) -> float:
        from vllm import SamplingParams

        prompts = [
            trainer.processing_class(prompt(largest.prompt, number))["input_ids"]
            for number in range(batch)
        ]
        generation.max_completion_length = tokens
        generation.llm.reset_prefix_cache()
        started = time.perf_counter()
        if place == TRAINER:
            generation.generate(prompts, None, 1)
        else:
            params = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True)
            generation.llm.generate(
                [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
            )
        return time.perf_counter() - started

    return seconds


def measure(
    contestants: dict[str, Contestant],
    batches: list[int],
    lengths: list[int],
    repeats: int,
    console: Console,
) -> list[dict[str, Any]]:
    """One cell per way, place, batch and length; a way that fails keeps its reason instead of
    seconds.
    """
    cells: dict[tuple[str, str, int, int], dict[str, Any]] = {}
    for tokens in lengths:
        for batch in batches:
            for repeat in range(repeats + 1):
                for way, contestant in contestants.items():
                    for place in (ENGINE, TRAINER):
                        cell = cells.setdefault(
                            (way, place, batch, tokens),
                            {
                                "way": way,
                                "place": place,
                                "batch": batch,
                                "tokens": tokens,
                                "seconds": [],
                            },
                        )
                        if "failure" in cell:
                            continue
                        try:
                            seconds = contestant.ask(place, batch, tokens)
                        except RuntimeError as error:
                            cell["failure"] = str(error)
                            continue
                        if repeat:  # the first warms up
                            cell["seconds"].append(seconds)
            console.print(f"{batch} completions of {tokens} tokens: measured")
    for cell in cells.values():
        if "failure" not in cell:
            cell["tokens_per_s"] = (
                cell["batch"] * cell["tokens"] / statistics.median(cell["seconds"])
            )
    return list(cells.values())


def print_table(record: dict[str, Any], console: Console) -> None:
    """Tokens per second; for each format also how it compares with BF16, in the engine and in the
    trainer.
    """
    found = {
        (cell["way"], cell["place"], cell["batch"], cell["tokens"]): cell.get("tokens_per_s")
        for cell in record["cells"]
    }
    table = Table(title=f"Tokens per second, {record['hardware']}", box=box.SIMPLE_HEAD)
    for column in (
        "tokens",
        "batch",
        "rollouts",
        "engine",
        "trainer",
        "engine gain",
        "trainer gain",
        "arrives",
    ):
        table.add_column(column, justify="right")
    for (way, place, batch, tokens), rate in found.items():
        if place != ENGINE:
            continue
        inside = found[way, TRAINER, batch, tokens]
        row = [str(tokens), str(batch), way, rounded(rate), rounded(inside)]
        base, base_inside = (
            found.get(("bf16", where, batch, tokens)) for where in (ENGINE, TRAINER)
        )
        if way != "bf16" and rate and inside and base and base_inside:
            gain, gain_inside = rate / base, inside / base_inside
            row += [f"{gain:.2f}", f"{gain_inside:.2f}", f"{gain_inside / gain:.1%}"]
        table.add_row(*row)
    console.print(table)
    for way in dict.fromkeys(cell["way"] for cell in record["cells"]):
        reasons = {
            cell["failure"] for cell in record["cells"] if cell["way"] == way and "failure" in cell
        }
        if reasons:
            console.print(f"{way} failed: {'; '.join(sorted(reasons))[:300]}")


def rounded(rate: float | None) -> str:
    """Tokens per second, or a dash."""
    return "-" if rate is None else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", nargs="?", help="directory of a model (default: random weights of --shape)"
    )
    add_shape_options(parser)
    add_precision_options(parser)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=["bf16", "int8"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    model = arguments.model or read_shape(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    record = {
        "benchmark": "rollouts",
        **provenance(torch.device(arguments.device), measured="trl_qurl"),
    }
    record |= {
        "shape": Path(model).name if isinstance(model, str) else asdict(model),
        "repeats": arguments.repeats,
    }
    batch = max(arguments.batches)
    precision = {"dtype": arguments.dtype, "engine_dtype": arguments.engine_dtype}
    record |= precision
    largest = Load(completions=batch, tokens=max(arguments.tokens), train_batch=batch, **precision)
    contestants = {
        way: Contestant(build, way, model, largest, arguments.device) for way in arguments.ways
    }
    try:
        record["cells"] = measure(
            contestants, arguments.batches, arguments.tokens, arguments.repeats, console
        )
    finally:
        for contestant in contestants.values():
            contestant.stop()
    path = write_record(record, arguments.output)
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
