"""What does a sync cost, for each format, transport and quantizer: seconds, bytes, and its share of
a training step?

    python benchmarks/weight_sync.py
    python benchmarks/weight_sync.py --layers 2 --hidden 256 --vocabulary 1000 --repeats 3
    python benchmarks/weight_sync.py --ways bf16-stream int8-stream int8-llmcompressor

A real trainer with a real colocated engine and random weights of Qwen3-0.6B's shape, in a separate
process for each way. After a warm-up, syncs with their checks are timed; then one training
step, whose parts come from the trainer's own log. A checkpoint goes through
/dev/shm, as it would to a server on the same machine, to which only the HTTP requests are added. On
a CPU without FP8 arithmetic a step with FP8 rollouts would take minutes, so there only the syncs
are measured.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from apart import measure_apart
from provenance import provenance, write_record
from rich.console import Console
from rich.table import Table
from shapes import Shape, add_shape_options, read_shape

COMPLETIONS = 8
COMPLETION_TOKENS = 64


class Way(NamedTuple):
    """A way to load weights into the engine."""

    scheme: str | None
    transport: str
    quantizer: str

    @property
    def name(self) -> str:
        """As it is asked for: `int8-stream`, `int8-checkpoint`, `int8-llmcompressor`."""
        way = "llmcompressor" if self.quantizer == "llmcompressor" else self.transport
        return f"{self.scheme or 'bf16'}-{way}"


WAYS = [
    Way(None, "stream", "-"),
    Way("int8", "stream", "streaming"),
    Way("fp8", "stream", "streaming"),
    Way(None, "checkpoint", "-"),
    Way("int8", "checkpoint", "streaming"),
    Way("fp8", "checkpoint", "streaming"),
    Way("int8", "checkpoint", "llmcompressor"),
    Way("fp8", "checkpoint", "llmcompressor"),
]


def measure(
    way: Way, shape: Shape, repeats: int, device: str, engine_dtype: str | None = None
) -> Iterator[dict[str, Any]]:
    """Build a trainer, sync, train one step; in this process, which holds an engine from then on.

    Yields what is known so far: a step may need more memory than the machine has, and a sync is of
    interest even so.
    """
    from datasets import Dataset

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

    trains = way.scheme != "fp8" or device == "cuda"
    engine: dict[str, Any] = {"enforce_eager": device == "cpu"}  # compiling takes minutes there
    if engine_dtype is not None:
        engine["dtype"] = engine_dtype
    with tempfile.TemporaryDirectory() as directory:
        config = QuRLGRPOConfig(
            directory,
            rollout_quantization=way.scheme,
            weight_sync="llmcompressor" if way.quantizer == "llmcompressor" else way.transport,
            sync_check_interval=10**6 if trains else 0,  # the first sync only
            per_device_train_batch_size=COMPLETIONS,
            num_generations=COMPLETIONS,
            max_completion_length=COMPLETION_TOKENS,
            max_steps=1,
            logging_steps=1,
            vllm_max_model_length=512,
            vllm_gpu_memory_utilization=0.5,
            vllm_engine_kwargs=engine,
            generation_kwargs={"ignore_eos": True},
            use_cpu=device == "cpu",
            bf16=device == "cuda",
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = QuRLGRPOTrainer(
            model=shape.build(torch.float32, torch.device("cpu")),
            reward_funcs=lambda completions, **kwargs: [
                float(len(completion)) for completion in completions
            ],
            args=config,
            train_dataset=Dataset.from_dict(
                {"prompt": ["What is the capital of France?"] * COMPLETIONS}
            ),
            processing_class=characters(),
        )
        generation = trainer.vllm_generation
        syncs = []
        for _ in range(repeats + 1):
            generation.cost.take()
            generation.sync_weights()
            cost = generation.cost.take()
            syncs.append((cost.sync_s, cost.quantize_s, cost.check_s))
            sent_bytes = cost.sent_bytes
        result: dict[str, Any] = {
            "sync_s": statistics.median(sync for sync, *_ in syncs[1:]),
            "sync_s_min": min(sync for sync, *_ in syncs[1:]),
            "sync_s_max": max(sync for sync, *_ in syncs[1:]),
            "quantize_s": statistics.median(quantize for _, quantize, _ in syncs[1:]),
            "check_s": syncs[0][2],
            "bytes": sent_bytes,
        }
        yield result
        if trains:
            # A policy that the engine already has is not sent again.
            with torch.no_grad():
                next(trainer.model.parameters()).mul_(1.01)
            trainer.train()
            log = next(row for row in trainer.state.log_history if "time/generate_s" in row)
            for part in ("sync", "generate", "logps", "update"):
                result[f"step_{part}_s"] = log[f"time/{part}_s"]
            yield result


def characters() -> Any:
    """A tokenizer of printable ASCII: what the weights are random for needs no better."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: number for number, token in enumerate(["<pad>", "<eos>", *map(chr, range(32, 127))])
    }
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>"
    )


def print_table(record: dict[str, Any], console: Console) -> None:
    """Format the measurements, one way per line."""
    table = Table(
        title=(
            f"Weight sync, {record['parameters'] / 1e9:.2f} billion parameters, "
            f"{record['hardware']}"
        )
    )
    for column in ("format", "transport", "quantizer"):
        table.add_column(column)
    for column in (
        "MB",
        "sync s",
        "min-max",
        "of it quantize s",
        "check s",
        "step s",
        "sync share",
    ):
        table.add_column(column, justify="right")
    for cell in record["cells"]:
        names = (cell["scheme"] or "bf16", cell["transport"], cell["quantizer"])
        if "sync_s" not in cell:
            table.add_row(*names, cell["failure"][:60])
            continue
        parts = (
            [cell[f"step_{part}_s"] for part in ("sync", "generate", "logps", "update")]
            if "step_sync_s" in cell
            else []
        )
        table.add_row(
            *names,
            f"{cell['bytes'] / 1e6:.0f}",
            f"{cell['sync_s']:.2f}",
            f"{cell['sync_s_min']:.2f}-{cell['sync_s_max']:.2f}",
            f"{cell['quantize_s']:.2f}",
            f"{cell['check_s']:.2f}",
            f"{sum(parts):.1f}" if parts else cell.get("failure", "")[:40],
            f"{parts[0] / sum(parts):.1%}" if parts else "",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape_options(parser)
    parser.add_argument(
        "--engine-dtype",
        help="of the engine's 16-bit layers; float32 for CPUs that emulate bfloat16",
    )
    parser.add_argument("--repeats", type=int, default=5)
    names = [way.name for way in WAYS]
    parser.add_argument(
        "--ways", nargs="+", choices=names, default=names, help="measure only these"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    shape = read_shape(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    record = {
        "benchmark": "weight_sync",
        **provenance(torch.device(arguments.device), measured="trl_qurl"),
    }
    record |= {"shape": asdict(shape), "repeats": arguments.repeats}
    record |= {"completions": COMPLETIONS, "completion_tokens": COMPLETION_TOKENS}
    record["engine_dtype"] = arguments.engine_dtype
    meta = shape.build(torch.float32, torch.device("meta"))
    record["parameters"] = sum(parameter.numel() for parameter in meta.parameters())
    record["cells"] = []
    for way in (way for way in WAYS if way.name in arguments.ways):
        started = time.perf_counter()
        cell = measure_apart(
            measure, way, shape, arguments.repeats, arguments.device, arguments.engine_dtype
        )
        record["cells"].append({**way._asdict(), **cell})
        console.print(
            f"{way.scheme or 'bf16'}, {way.transport}, {way.quantizer}: "
            f"{time.perf_counter() - started:.0f} s"
        )
    path = write_record(record, arguments.output)
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
