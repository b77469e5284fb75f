"""`trl-qurl bench`: measure each format and the rest of a step in separate processes, compare, and
advise.

Heavy imports wait until the command runs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.options import check_model
from trl_qurl.lab.bench.prediction import Bench, build_table, sentences
from trl_qurl.lab.bench.workload import (
    ENGINE_SHARE,
    TRAINING,
    Job,
    Workload,
    find_device,
    why_too_large,
)
from trl_qurl.lab.comparison import (
    BASELINE,
    add_options,
    candidates,
    check_output,
    fitting_formats,
    write_json,
)
from trl_qurl.lab.packages import require
from trl_qurl.lab.processes import call_in_child
from trl_qurl.rollout.wire import COMPILING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl bench`."""
    parser.epilog = "Uses random weights: the cost of a step does not depend on their values."
    parser.add_argument("model", metavar="MODEL", help="Hub name or directory with a config.json")
    for option in fields(Workload):
        help = f"{option.metadata['help']} (default: %(default)s)"
        parser.add_argument(
            f"--{option.name.replace('_', '-')}", type=int, default=option.default, help=help
        )
    add_options(parser, Path("bench.json"))


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the advice, and return exit status 0 for any advice."""
    from rich.console import Console

    workload = Workload(**{option.name: getattr(args, option.name) for option in fields(Workload)})
    check_model(args.model)
    check_output(args.output)
    console = Console()
    result = bench(
        args.model,
        workload,
        args.scheme,
        args.ignore,
        args.engine_kwargs,
        console.print,
        args.output,
    )
    console.print(build_table(result))
    for line in sentences(result):
        console.print(line)
    print(f"Results: {args.output}")
    return 0


def bench(
    model: str,
    workload: Workload,
    schemes: Sequence[str] | None = None,
    ignore: Sequence[str] = ("lm_head",),
    engine_kwargs: Mapping[str, Any] = MappingProxyType({}),
    say: Callable[[str], None] = lambda line: None,
    output: Path | None = None,
) -> Bench:
    """Measure the cost of training steps with 16-bit and with quantized rollouts on this machine.

    Args:
        model: Hub name or directory with a `config.json`. No weights are needed.
        workload: The step to predict.
        schemes: Formats, as `--scheme` lists them; by default all that this machine and the model
            support.
        ignore: Modules to keep in full precision.
        engine_kwargs: Extra arguments for `vllm.LLM`.
        say: Called with each progress message.
        output: JSON file, rewritten after each measurement.

    Returns:
        Measurements and predictions.

    Raises:
        ValueError: If an argument is invalid, or the model cannot be quantized.
        ImportError: If vLLM or PEFT is missing.
        ChildProcessError: If no measurement succeeded; the process output says why.
    """
    started = time.monotonic()
    _check(workload, schemes)
    with tempfile.TemporaryDirectory() as directory:
        empty = save_config(model, workload, directory)
        parts: dict[str, Any] = {BASELINE: BASELINE, **fitting_formats(empty, schemes, ignore, say)}
        share = engine_kwargs.get("gpu_memory_utilization", ENGINE_SHARE)
        result = Bench(
            model,
            workload,
            too_large=why_too_large(empty, workload.lora_rank, find_device(), share),
        )
        fits = result.too_large is None
        if result.too_large is None:
            parts[TRAINING] = TRAINING
        else:
            say(result.too_large)
        compiles = not engine_kwargs.get("enforce_eager", not find_device().is_gpu)
        for number, (part, formats) in enumerate(parts.items(), 1):
            job = Job(formats, directory, workload, tuple(ignore), fits, dict(engine_kwargs))
            compiling = COMPILING if compiles and part != TRAINING else ""
            say(f"Measuring {job.description} ({number} of {len(parts)}){compiling}")
            _measure(result, part, job, is_last=number == len(parts))
            result.conclude()
            result.seconds = time.monotonic() - started
            if output is not None:
                write_json(result, output)
    return result


def _measure(result: Bench, part: str, job: Job, is_last: bool) -> None:
    """Add the costs of one part to the result, or why it failed."""
    try:
        costs = run_job(job)
    except ChildProcessError as error:
        if is_last and not result.measurements:
            raise
        result.failures[part] = str(error)
        return
    if part == TRAINING:
        result.training = costs
    else:
        result.measurements[part] = costs


def _check(workload: Workload, schemes: Sequence[str] | None) -> None:
    """Report missing packages and unknown formats before any slow work."""
    from trl_qurl.rollout.engine.launch import require_vllm

    require_vllm()
    if workload.lora_rank:
        require("An adapter", "peft", extra="peft")
    candidates(schemes)


def save_config(model: str, workload: Workload, directory: str) -> PreTrainedModel:
    """Write the model's config to a directory, and return the model on the meta device.

    Raises:
        ValueError: If the context is too short for the workload.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is not None and workload.length > context:
        raise ValueError(
            f"Prompts of {workload.prompt_len} and completions of {workload.completion_len} tokens "
            f"do not fit into the model's context of {context}: shorten --prompt-len or "
            "--completion-len."
        )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(directory)
    return empty


def run_job(job: Job) -> Any:
    """Measure in a separate process.

    Raises:
        ChildProcessError: If the process failed. Its last output lines go to standard error.
    """
    from trl_qurl.lab.bench.measure import measure_engine, measure_training

    failure = (
        f"Measuring {job.description} failed; the last output lines are above. If it ran out of "
        "memory, lower --batch or --completion-len."
    )
    return call_in_child(measure_training if job.part == TRAINING else measure_engine, job, failure)
