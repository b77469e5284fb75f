"""`trl-qurl bench`: plan, take steps in each format, compare.

Heavy imports wait until the command runs.
"""

from __future__ import annotations

import argparse
import functools
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.cli.options import check_model
from trl_qurl.lab.bench.child import Child
from trl_qurl.lab.bench.plan import ENGINE_ALONE, IN_TURNS, WAYS, Job, Load, advice, estimate
from trl_qurl.lab.bench.verdict import Step, compare
from trl_qurl.lab.comparison import (
    BASELINE,
    add_options,
    check_output,
    fitting_formats,
    label,
    read_schemes,
    write_json,
)
from trl_qurl.lab.device import use_one_gpu
from trl_qurl.lab.packages import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUT_OF_MEMORY = re.compile(
    "status -9|out of memory|available memory|free memory|allocate memory|memory are free", re.I
)
"""How Linux ends a process that takes too much, and what torch, vLLM and we say."""


@dataclass
class Result:
    """What was measured, and how."""

    model: str
    load: Load
    way: str
    steps: dict[str, list[Step]] = field(default_factory=dict)  # by format
    failures: dict[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl bench`."""
    parser.epilog = "A step is a sync, a rollout of full length, its scores and its updates."
    parser.add_argument("model", metavar="MODEL", help="Hub name or directory with a config.json")
    for option in fields(Load):
        help = f"{option.metadata['help']} (default: %(default)s)"
        name = option.name.replace("_", "-")
        parser.add_argument(f"--{name}", type=int, default=option.default, help=help)
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="begin no steps after so many minutes, but take two in each format, of which only the "
        "second counts (default: 10)",
    )
    parser.add_argument(
        "--weights", action="store_true", help="load the model's weights (default: random ones)"
    )
    parser.add_argument(
        "--vllm-server-base-url",
        type=lambda text: text.split(","),
        metavar="URL[,URL...]",
        help="a running `trl-qurl serve` for each format of --scheme, in this order",
    )
    parser.add_argument(
        "--dry-run",
        type=float,
        nargs="?",
        const=0.0,
        metavar="GB",
        help="only say what would be done here, or on a GPU of so many GB with the formats of this "
        "machine",
    )
    add_options(parser, Path("bench.json"))


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and the verdicts; the exit status is 1 if nothing was measured."""
    from trl_qurl.rollout.engine.launch import require_vllm

    load = Load(**{option.name: getattr(args, option.name) for option in fields(Load)})
    if not args.minutes > 0:
        raise ValueError(f"--minutes is {args.minutes:g}: give a positive number.")
    if args.dry_run is not None and args.dry_run < 0:
        raise ValueError(f"--dry-run is {args.dry_run:g}: give the size of a GPU in GB.")
    check_model(args.model)
    check_output(args.output)
    require_vllm()
    use_one_gpu()
    if load.lora_rank:
        require("An adapter", "peft", extra="peft")
    from rich.console import Console

    from trl_qurl.lab.bench.trial import random_model

    model = random_model(args.model, "meta")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", load.length)
    if load.length > context:
        raise ValueError(
            f"Prompts of {load.prompt_len} and completions of {load.completion_len} tokens do not "
            f"fit into the model's context of {context}: shorten --prompt-len or --completion-len."
        )
    jobs = make_jobs(args, load, model)
    memory = estimate(model, load, args.dry_run or 0.0)
    ways = WAYS[:2] if args.vllm_server_base_url else memory.ways(len(jobs))
    trained = f"an adapter of rank {load.lora_rank}" if load.lora_rank else "all weights"
    print(
        f"{args.model}: {memory.parameters / 1e9:.3g} billion parameters, training {trained}\n"
        f"A step: {load.batch} completions of {load.completion_len} tokens to prompts of "
        f"{load.prompt_len}; updates: {load.updates}, in passes of {load.train_batch}\n"
        f"Memory by calculation: {memory.training / 1e9:.1f} GB for weights, gradients and AdamW, "
        f"{memory.engine / 1e9:.1f} GB for an engine beside it, of {memory.device / 1e9:.1f} GB\n"
        f"Formats: {', '.join(map(label, jobs))}; {ways[0]}, for {args.minutes:g} minutes"
    )
    if text := advice(memory):
        print(text)
    if args.dry_run is not None:
        return 0
    for way in ways:
        result = Result(args.model, load, way)
        measure(result, jobs, args.minutes * 60, args.output)
        if not any(map(OUT_OF_MEMORY.search, result.failures.values())):
            break
        print(f"Not enough memory for {way}.")
    print(f"Results: {args.output}")
    table, sentences = compare(result.steps, load.batch * load.completion_len)
    Console().print(table)
    for line in sentences:
        print(line)
    for name, failure in result.failures.items():
        print(f"{label(name)} was not measured. {failure}")
    return 0 if result.steps else 1


def make_jobs(args: argparse.Namespace, load: Load, model: PreTrainedModel) -> dict[str, Job]:
    """Return what to measure: 16 bits and the formats that fit, or those of the servers."""
    import requests

    from trl_qurl.lab.device import full_precision

    build = functools.partial(Job, args.model, load, args.weights, args.ignore)
    if not args.vllm_server_base_url:
        formats = {BASELINE: BASELINE, **fitting_formats(model, args.scheme, args.ignore, print)}
        engine = {"vllm_engine_kwargs": {"dtype": full_precision()[1], **args.engine_kwargs}}
        return {name: build(form, engine) for name, form in formats.items()}
    served = read_schemes(args.scheme or [])
    urls = args.vllm_server_base_url
    if len(served) != len(urls):
        raise ValueError(
            f"--vllm-server-base-url has {len(urls)} servers, and --scheme {len(served)} formats: "
            "list the format of each server, in the same order."
        )
    jobs = {}
    for (name, form), url in zip(served.items(), urls, strict=True):
        try:
            requests.get(f"{url}/health", timeout=10)  # any answer will do
        except requests.RequestException as error:
            raise ValueError(
                f"No server answers at {url} ({type(error).__name__}): start `trl-qurl serve` "
                "first, or correct --vllm-server-base-url."
            ) from None
        jobs[name] = build(form, {"vllm_mode": "server", "vllm_server_base_url": url})
    return jobs


def measure(result: Result, jobs: Mapping[str, Job], seconds: float, output: Path) -> None:
    """Take steps in the result's way for so many seconds, and write them after each round."""
    function = "generate" if result.way == ENGINE_ALONE else "train"
    groups = [[*jobs]] if result.way == IN_TURNS else [[name] for name in jobs]
    for group in groups:
        deadline = time.monotonic() + seconds / len(groups)
        children = {}
        rounds = 0
        try:
            while group and (rounds < 2 or time.monotonic() < deadline):
                for name in [*group]:
                    if name not in children:
                        print(
                            f"{label(name)}: starting, with a step that does not count", flush=True
                        )
                        children[name] = Child(function, jobs[name])
                    try:
                        step = children[name].step()
                    except ChildProcessError as error:
                        result.failures[name] = str(error)
                        group.remove(name)
                        continue
                    if rounds > 0:
                        result.steps.setdefault(name, []).append(step)
                    else:
                        taken = step.get("step", step["rollout"])
                        print(f"{label(name)}: that one took {taken:.0f} s", flush=True)
                rounds += 1
                write_json(result, output)
        finally:
            for child in children.values():
                child.stop()
