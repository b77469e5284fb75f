"""What does it cost per step to make the 8-bit weights: our stream, or llm-compressor's `oneshot` +
`save_pretrained`?

    python benchmarks/quantizer.py
    python benchmarks/quantizer.py --scheme int8 --dtypes bfloat16 --repeats 9

The model has the shape of Qwen3-0.6B and random weights, so nothing is downloaded: neither way
looks at the values. Both start from the policy's parameters, and their results are compared bit for
bit. Left out is what follows in a training step and is the same for either (vLLM reading the
tensors), and what happens once per run (building the model, listing its layers, imports). A first
round warms up and is dropped; in the others the ways take turns.
"""

import argparse
import gc
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from shapes import Shape
from transformers import PreTrainedModel

from trl_qurl.quantization import SCHEMES, QuantizationScheme, get_scheme, make_plan
from trl_qurl.quantization.checkpoint import CheckpointWriter, check_quantizer
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.directory import CheckpointDirectory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
IGNORE = ("lm_head",)

Case = tuple[str, str]
"""Names of a dtype and a scheme."""

STREAM, WRITTEN = "stream", "stream, written"
REFERENCE, REFERENCE_WITH_COPY = "llm-compressor", "llm-compressor, with its copy"
WAYS = (STREAM, WRITTEN, REFERENCE, REFERENCE_WITH_COPY)

TARGET_SHARE = 0.1
"""Of llm-compressor's time: what the stream may take at most."""


# The ways
# --------------------------------------------------------------------------------------------------
# Each takes (model, scheme, directory to create) and returns seconds.


def run_stream(
    model: PreTrainedModel, scheme: QuantizationScheme, directory: Path
) -> dict[str, float]:
    """What a colocated sync makes: each tensor is dropped as soon as the engine would have it."""
    stream = WeightStream(model, make_plan(model, scheme.name, IGNORE))
    start = time.perf_counter()
    for _ in stream.tensors(parameters(model)):
        pass
    return {STREAM: now(model) - start}


def run_written(
    model: PreTrainedModel, scheme: QuantizationScheme, directory: Path
) -> dict[str, float]:
    """The stream as a checkpoint: the same product as llm-compressor's."""
    start = time.perf_counter()
    plan = make_plan(model, scheme.name, IGNORE)
    CheckpointWriter(model, None, plan).write(
        WeightStream(model, plan).tensors(parameters(model)), directory
    )
    return {WRITTEN: now(model) - start}


def run_reference(
    model: PreTrainedModel, scheme: QuantizationScheme, directory: Path
) -> dict[str, float]:
    """llm-compressor, which quantizes in place and so needs a copy of the policy: timed with and
    without copying.
    """
    copied = start = time.perf_counter()

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal copied
        yield from parameters(model)
        # the copy holds every tensor; from here on, oneshot and save_pretrained
        copied = time.perf_counter()

    CheckpointWriter(model, None, make_plan(model, scheme.name, IGNORE)).write_with_llmcompressor(
        watched(), directory
    )
    end = now(model)
    return {REFERENCE: end - copied, REFERENCE_WITH_COPY: end - start}


RUNS: dict[str, Callable[[PreTrainedModel, QuantizationScheme, Path], dict[str, float]]] = {
    STREAM: run_stream,
    WRITTEN: run_written,
    REFERENCE_WITH_COPY: run_reference,
}


def parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter.data) for name, parameter in model.named_parameters())


def now(model: PreTrainedModel) -> float:
    """The clock, once the device has finished what it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


# Time and equality
# --------------------------------------------------------------------------------------------------


def measure_seconds(
    cases: list[Case],
    shape: Shape,
    device: torch.device,
    repeats: int,
    directory: Path,
    console: Console,
) -> dict[Case, dict[str, list[float]]]:
    """
    Time every way in every case, and compare what they wrote.

    Returns:
        For each case and way, the seconds of each repeat.

    Raises:
        AssertionError: If the stream and llm-compressor differ in any bit of any tensor.
    """
    models = {dtype: shape.build(DTYPES[dtype], device) for dtype in dict(cases)}
    seconds: dict[Case, dict[str, list[float]]] = {
        case: {way: [] for way in WAYS} for case in cases
    }
    paths = {way: directory / f"checkpoint-{index}" for index, way in enumerate(RUNS)}
    for repeat in range(repeats + 1):
        for dtype, scheme in cases:
            console.print(f"Round {repeat} of {repeats}: {dtype}, {scheme}")
            for way, run in RUNS.items():
                gc.collect()
                for timed_way, elapsed in run(
                    models[dtype], get_scheme(scheme), paths[way]
                ).items():
                    if repeat > 0:
                        seconds[dtype, scheme][timed_way].append(elapsed)
            if repeat == 0:
                assert_equal_checkpoints(paths[WRITTEN], paths[REFERENCE_WITH_COPY])
            for path in paths.values():
                shutil.rmtree(path, ignore_errors=True)
    return seconds


def assert_equal_checkpoints(ours: Path, reference: Path) -> None:
    """Compare every tensor of two checkpoints: name, type, shape and bits."""
    streamed, saved = tensor_files(ours), tensor_files(reference)
    assert streamed.keys() == saved.keys(), (
        f"other tensors: {sorted(streamed.keys() ^ saved.keys())[:5]}"
    )
    for name, file in saved.items():
        with safe_open(streamed[name], "pt") as left, safe_open(file, "pt") as right:
            a, b = left.get_tensor(name), right.get_tensor(name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{name} differs"


def tensor_files(checkpoint: Path) -> dict[str, Path]:
    """The file of each tensor, in one shard or several."""
    found = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    return found


# Memory
# --------------------------------------------------------------------------------------------------


def measure_memory(
    cases: list[Case], shape: Shape, device: torch.device, console: Console
) -> dict[Case, dict[str, int]]:
    """Peak extra bytes for each case and way, each measured in a separate process."""
    context = multiprocessing.get_context("spawn")
    peaks: dict[Case, dict[str, int]] = {case: {} for case in cases}
    for case, way in product(cases, RUNS):
        console.print(f"Memory: {', '.join(case)}, {way}")
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, shape, *case, way, device, torch.get_num_threads())
        process = context.Process(target=send_peak_extra_bytes, args=arguments)
        process.start()
        sender.close()
        # EOFError, after the process's own traceback, if it failed
        peaks[case][way] = receiver.recv()
        process.join()
    return peaks


def send_peak_extra_bytes(sender: Connection, *arguments: Any) -> None:
    sender.send(peak_extra_bytes(*arguments))


def peak_extra_bytes(
    shape: Shape, dtype: str, scheme: str, way: str, device: torch.device, threads: int
) -> int:
    """Most memory that one run holds beyond the model, on the model's device; a fresh process is
    needed to tell.
    """
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as directory:
        # Imports, thread pools and code pages are not the weights': a tiny model brings them in
        # first.
        RUNS[way](
            Shape(1, 64, 512).build(DTYPES[dtype], device),
            get_scheme(scheme),
            Path(directory) / "tiny",
        )
        model = shape.build(DTYPES[dtype], device)
        gc.collect()
        reset_peak(device)
        before = peak_bytes(device)
        RUNS[way](model, get_scheme(scheme), Path(directory) / "checkpoint")
        return peak_bytes(device) - before


def reset_peak(device: torch.device) -> None:
    """Reset the high-water mark to the current memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc: resets VmHWM


def peak_bytes(device: torch.device) -> int:
    """High-water mark of device memory, or of the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


def largest_layer_bytes(shape: Shape) -> dict[str, int]:
    """Weight, quotient and codes of the largest quantized layer, by dtype: what the stream may hold
    at most.
    """
    model = Shape(1, shape.hidden, 512).build(torch.float32, torch.device("meta"))
    layers = make_plan(model, "int8", IGNORE).schemes
    numel = max(
        weight.numel()
        for name, weight in model.named_parameters()
        if name.removesuffix(".weight") in layers
    )
    return {name: numel * (2 * dtype.itemsize + 1) for name, dtype in DTYPES.items()}


# The result
# --------------------------------------------------------------------------------------------------


def summarize(
    seconds: dict[Case, dict[str, list[float]]],
    peaks: dict[Case, dict[str, int]],
    largest: dict[str, int],
) -> list[dict[str, Any]]:
    """One record per case and way."""
    return [
        {
            "dtype": dtype,
            "scheme": scheme,
            "way": way,
            "seconds": values,
            "median_s": statistics.median(values),
            "min_s": min(values),
            "max_s": max(values),
            "share": statistics.median(values) / statistics.median(ways[REFERENCE]),
            "peak_extra_bytes": peaks[dtype, scheme].get(way),
            "largest_layer_bytes": largest[dtype],
        }
        for (dtype, scheme), ways in seconds.items()
        for way, values in ways.items()
    ]


def print_table(record: dict[str, Any], console: Console) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    table = Table(
        title=(
            f"{record['parameters'] / 1e9:.2g}B parameters, {record['hardware']}, "
            f"{record['threads']} threads"
        ),
        caption=(
            f"{record['date']}, commit {record['commit']}, load {record['load_average']:.1f} at "
            f"the start, {record['repeats']} repeats; {versions}"
        ),
        box=box.SIMPLE,
    )
    for column in ("weights", "scheme", "way"):
        table.add_column(column, no_wrap=True)
    for column in ("median s", "min-max s", "share", "extra MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in record["cells"]:
        memory = row["peak_extra_bytes"]
        table.add_row(
            *(row["dtype"], row["scheme"], row["way"]),
            f"{row['median_s']:.3f}",
            f"{row['min_s']:.3f}-{row['max_s']:.3f}",
            f"{row['share']:.1%}",
            "" if memory is None else f"{memory / 1e6:.1f}",
            end_section=row["way"] == WAYS[-1],
        )
    console.print(table)
    console.print(f"Checkpoints equal bit for bit, all tensors: {verdict(record['equal'])}")
    for row in record["cells"]:
        if row["way"] == STREAM:
            share, memory, bound = row["share"], row["peak_extra_bytes"], row["largest_layer_bytes"]
            console.print(
                f"{row['dtype']}, {row['scheme']}: at most {TARGET_SHARE:.0%} of llm-compressor's "
                f"time: {verdict(share <= TARGET_SHARE)}; at most the largest layer's "
                f"{bound / 1e6:.1f} MB: {verdict(memory <= bound)}"
            )


def verdict(held: bool) -> str:
    return "yes" if held else "NO"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--hidden", type=int, default=Shape.hidden, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=Shape.vocabulary)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--scheme", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed rounds, after one that is dropped"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--directory",
        help="where checkpoints are written (default: as in training, memory if it fits)",
    )
    parser.add_argument(
        "--output", type=Path, help="JSON file (default: benchmarks/results/quantizer-...json)"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    check_quantizer("llmcompressor")
    torch.set_num_threads(arguments.threads)
    shape, device = (
        Shape(arguments.layers, arguments.hidden, arguments.vocabulary),
        arguments.device,
    )
    cases = list(product(arguments.dtypes, arguments.scheme))
    console = Console(width=None if sys.stdout.isatty() else 110)
    total = sum(
        weight.numel() for weight in shape.build(torch.float32, torch.device("meta")).parameters()
    )
    record = {"benchmark": "quantizer", **provenance(device, measured="trl_qurl/quantization")}

    peaks = measure_memory(cases, shape, device, console)
    directory = CheckpointDirectory(arguments.directory, bytes_needed=2 * 4 * total)
    seconds = measure_seconds(cases, shape, device, arguments.repeats, directory.path, console)
    directory.remove()
    record |= {"shape": asdict(shape), "parameters": total, "repeats": arguments.repeats}
    record["equal"] = True  # or measure_seconds would have raised
    record["cells"] = summarize(seconds, peaks, largest_layer_bytes(shape))

    path = write_record(record, arguments.output)
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
