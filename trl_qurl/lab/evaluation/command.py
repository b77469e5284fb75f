"""`trl-qurl eval`: answer benchmarks in several number formats, and compare them by question.

Each format has a process of its own. All files are in one directory: `<format>-<digest>.json` has
the graded answers, where the digest is of the settings, and `results.json` the results. Running
again with the same settings answers only in the formats that are not finished.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.options import add_ignore, check_model
from trl_qurl.lab.comparison import (
    BASELINE,
    add_kwargs,
    add_numbers,
    add_schemes,
    check_positive,
    read_schemes,
    write_json,
)

if TYPE_CHECKING:
    from trl_qurl.quantization.plan import Formats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `trl-qurl eval`."""
    parser.epilog = (
        "Run the same command again to continue: formats that are finished are not repeated."
    )
    parser.add_argument("model", metavar="MODEL", help="Hub name or local directory")
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="TASK[,TASK...]",
        help="any of gsm8k, math500, aime24, amc23, minerva, olympiad; local .jsonl(.gz) files; "
        "owner/set[:config:split]; name=source",
    )
    add_schemes(parser, " (default: none)", default=BASELINE)
    add_numbers(
        parser,
        samples=(1, "answers per question"),
        temperature=(0.0, "0 for greedy answers; the paper samples at 1 or 0.6"),
        top_p=(0.7, "top-p for sampling, by default the paper's"),
        max_tokens=(2048, "longest completion"),
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="use only the first N questions of each task"
    )
    parser.add_argument(
        "--output-dir", type=Path, help="where to save answers and results (default: eval-MODEL)"
    )
    add_ignore(parser)
    add_kwargs(parser)
    add_kwargs(
        parser,
        "--chat-template-kwargs",
        'as in training: for the chat template ({"enable_thinking": false})',
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate the model in each format, print and save the results, and return exit status 0."""
    formats = check_arguments(args)

    from rich.console import Console

    from trl_qurl.lab.data import describe_solutions
    from trl_qurl.lab.evaluation.results import build_table, summarize
    from trl_qurl.lab.evaluation.tasks import encode_prompts, load_tasks
    from trl_qurl.lab.evaluation.worker import Job, answer_once
    from trl_qurl.rollout.engine.launch import content_digest, resolve_model

    tasks = load_tasks(args.tasks.split(","), args.limit)
    for task in tasks:
        print(f"{task.name}: {describe_solutions(task.solutions)}", flush=True)
    directory = resolve_model(args.model)
    template = args.chat_template_kwargs
    encoded = [
        encode_prompts(directory, task.prompts, args.max_tokens, **template) for task in tasks
    ]
    sampling = {name: getattr(args, name) for name in ("temperature", "top_p", "max_tokens")}
    settings = {
        "model": args.model,
        "model_digest": content_digest(Path(directory)),
        "tasks": {task.name: task.digest for task in tasks},
        "sampling": {"n": args.samples, **sampling},
        "ignore": sorted(args.ignore),
        "chat_template_kwargs": template,
    }
    output_dir = args.output_dir or Path(f"eval-{Path(args.model).name}")
    output_dir.mkdir(parents=True, exist_ok=True)
    answers = {}
    for name, form in formats.items():
        label, checkpoint, engine_kwargs = engine_of(args, name, form, directory)
        job = Job(
            label,
            checkpoint,
            form,
            tasks,
            [prompts for prompts, _ in encoded],
            max(length for _, length in encoded),
            settings["sampling"],
            engine_kwargs,
        )
        content = json.dumps([settings, form]).encode()
        digest = hashlib.blake2b(content, digest_size=4).hexdigest()
        answers[job.label] = answer_once(job, output_dir / f"{name}-{digest}.json")
    results = summarize(answers)
    write_json({**settings, "results": results}, output_dir / "results.json")
    Console().print(build_table(results, args.model))
    print(f"Results: {output_dir / 'results.json'}")
    return 0


def engine_of(
    args: argparse.Namespace, name: str, form: Formats, directory: str
) -> tuple[str, str, dict[str, Any]]:
    """Return a format's label, its checkpoint, which is made first, and the engine's arguments."""
    from trl_qurl.lab.device import full_precision
    from trl_qurl.rollout.engine.launch import starting_checkpoint

    label, dtype = full_precision()
    arguments = {"dtype": dtype, **args.engine_kwargs}
    checkpoint = directory
    if form is not None:
        label = name.upper()
        checkpoint = str(starting_checkpoint(directory, form, args.ignore, arguments))
    elif '"quantization_config"' in Path(directory, "config.json").read_text(encoding="utf-8"):
        label = "as stored"
    return label, checkpoint, arguments


def check_arguments(args: argparse.Namespace) -> dict[str, Formats]:
    """Check what can be checked at once, and return the formats by short name."""
    from trl_qurl.lab.packages import require
    from trl_qurl.quantization.plan import schemes_of
    from trl_qurl.rollout.checks.hardware import kernel_environment
    from trl_qurl.rollout.engine.launch import require_vllm

    formats = read_schemes(args.scheme)
    check_positive(args, "samples", "top_p", "max_tokens")
    if args.top_p > 1:
        raise ValueError(f"--top-p is {args.top_p:g}: give a number up to 1.")
    if args.temperature < 0:
        raise ValueError(f"--temperature is {args.temperature:g}: give 0, or a positive number.")
    if args.samples > 1 and args.temperature == 0:
        raise ValueError(
            f"--samples {args.samples} samples the same greedy answer again: set a --temperature "
            "above 0 (the paper: 1 or 0.6)."
        )
    require_vllm()
    require("Evaluating", "math_verify", "rich", extra="eval")
    for form in formats.values():
        kernel_environment(*schemes_of(form))  # raises if this machine has no kernel
    check_model(args.model)
    return formats
