"""The command `trl-qurl`: parse, call, print.

Everything heavy is imported inside the subcommand that needs it, so that `--help` answers at once. What a user can
cause (a missing file, a setting that does not fit, a part that is not installed) is printed as one line; with
`TRL_QURL_DEBUG=1` the traceback is shown instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_qurl._version import __version__
from trl_qurl.rollout.errors import RolloutError

USER_ERRORS = (ValueError, ImportError, OSError, RolloutError)  # OSError covers FileNotFoundError, ConnectionError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: 0, 1 if a demo fell short of its goal, 2 for a user's error."""
    parser = build_parser()
    args, further = parser.parse_known_args(argv)
    if args.command in ("grpo", "ppo", "serve"):
        args.further = further
    elif further:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    try:
        return args.run(args)
    except USER_ERRORS as error:
        if os.environ.get("TRL_QURL_DEBUG") == "1":
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"trl-qurl: error: {message}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """All subcommands; each sets `run`, the function that serves it."""
    parser = argparse.ArgumentParser(prog="trl-qurl", description="Reinforcement learning with quantized rollouts.")
    parser.add_argument("--version", action="version", version=f"trl-qurl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    grpo = commands.add_parser("grpo", add_help=False, help="train on questions with checkable answers (GSM8K)")
    grpo.set_defaults(run=run_grpo)

    ppo = commands.add_parser("ppo", add_help=False, help="the same with a critic, as in the paper's first experiment")
    ppo.set_defaults(run=run_ppo)

    quantize = commands.add_parser("quantize", help="write the 8-bit checkpoint of a model")
    quantize.add_argument("model", metavar="MODEL", help="name on the Hub, or a local directory")
    quantize.add_argument("output_dir", metavar="OUT", type=Path, help="directory of the checkpoint")
    quantize.add_argument("--scheme", choices=["int8", "fp8"], required=True)
    quantize.add_argument("--ignore", nargs="+", default=["lm_head"], metavar="PATTERN", help="modules to leave alone")
    quantize.add_argument("--quantizer", choices=["llmcompressor", "streaming"], default="llmcompressor")
    quantize.set_defaults(run=run_quantize)

    serve = commands.add_parser(
        "serve",
        help="start a vLLM server for training; options it does not know go to vLLM",
        epilog="The server loads weights from whoever reaches it, key or not: keep it on a private interface.",
    )
    serve.add_argument("model", metavar="MODEL", help="full-precision model: name on the Hub, or a local directory")
    serve.add_argument("--scheme", choices=["int8", "fp8", "none"], default="int8", help="none: BF16 rollouts")
    serve.add_argument("--ignore", nargs="+", default=["lm_head"], metavar="PATTERN", help="modules to leave alone")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    serve.set_defaults(run=run_serve)

    evaluation = commands.add_parser(
        "eval",
        help="answer and grade benchmarks, in full precision and in 8 bits",
        epilog="Started again with the same arguments, it makes only what is missing.",
    )
    evaluation.add_argument("model", metavar="MODEL", help="name on the Hub, or a local directory")
    evaluation.add_argument(
        "--tasks",
        required=True,
        metavar="TASK[,TASK...]",
        help="of gsm8k, math500, aime24, amc23, minerva, olympiad; local .jsonl(.gz) files; owner/set[:config:split]; "
        "name=source",
    )
    evaluation.add_argument("--schemes", default="none", metavar="none,int8,fp8", help="formats of the same weights")
    evaluation.add_argument("--samples", type=int, default=0, metavar="K", help="sampled answers to each question")
    evaluation.add_argument("--no-greedy", action="store_true", help="leave out the greedy answer to each question")
    evaluation.add_argument("--temperature", type=float, default=1.0, help="of the samples (the paper: 1.0, or 0.6)")
    evaluation.add_argument("--top-p", type=float, default=0.7, help="of the samples (default: the paper's 0.7)")
    evaluation.add_argument("--max-tokens", type=int, default=2048, help="longest completion")
    evaluation.add_argument("--limit", type=int, help="only the first so many questions of each task")
    evaluation.add_argument("--seed", type=int, default=0)
    evaluation.add_argument("--output-dir", type=Path, help="for answers and results (default: eval-MODEL)")
    evaluation.add_argument("--ignore", nargs="+", default=["lm_head"], metavar="PATTERN", help="modules left alone")
    evaluation.add_argument(
        "--engine-kwargs", type=json_dictionary, default={}, metavar="JSON", help="further arguments of vllm.LLM"
    )
    evaluation.set_defaults(run=run_eval)

    bench = commands.add_parser(
        "bench",
        help="measure whether quantized rollouts pay on this machine",
        epilog="No weights are loaded: what a step costs does not depend on what they are.",
    )
    bench.add_argument("model", metavar="MODEL", help="name on the Hub, or a directory with a config.json")
    bench.add_argument("--prompt-len", type=int, default=256, help="tokens of a prompt (default: %(default)s)")
    bench.add_argument("--completion-len", type=int, default=512, help="tokens of a completion (default: %(default)s)")
    bench.add_argument("--batch", type=int, default=64, help="completions of a rollout (default: %(default)s)")
    bench.add_argument("--generations", type=int, default=8, help="completions of a prompt (default: %(default)s)")
    bench.add_argument("--train-batch", type=int, default=8, help="completions in a pass (default: %(default)s)")
    bench.add_argument("--updates", type=int, default=4, help="optimizer steps per rollout (default: %(default)s)")
    bench.add_argument("--no-gradient-checkpointing", action="store_true", help="train without it")
    bench.add_argument("--schemes", metavar="int8,fp8", help="formats (default: those this machine has kernels for)")
    bench.add_argument("--quick", action="store_true", help="spend seconds on each measurement, and estimate more")
    bench.add_argument("--ignore", nargs="+", default=["lm_head"], metavar="PATTERN", help="modules left alone")
    bench.add_argument(
        "--engine-kwargs", type=json_dictionary, default={}, metavar="JSON", help="further arguments of vllm.LLM"
    )
    bench.add_argument("-o", "--output", type=Path, help="JSON file for all figures")
    bench.set_defaults(run=run_bench)

    report = commands.add_parser("report", help="draw the paper's figures from the logs of runs, on one page")
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output_dir of a run, or its run.jsonl(.gz)")
    report.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the page (default: %(default)s)"
    )
    report.set_defaults(run=run_report)

    demo = commands.add_parser("demo", help="train a tiny model on three-digit addition, in minutes, on CPU")
    demo.add_argument("--scheme", choices=["int8", "fp8", "none"], default="int8", help="none: BF16 rollouts")
    demo.add_argument("--algorithm", choices=["grpo", "ppo"], default="grpo", help="ppo: a critic, and no groups")
    demo.add_argument("--compare", choices=["int8", "fp8", "none"], help="first train with these rollouts as well")
    demo.add_argument("--output-dir", type=Path, default=Path("demo-output"), help="for the picture and the log")
    demo.add_argument("--rollouts", type=int, default=120, help="each makes 256 completions and four updates")
    demo.add_argument("--required-rise", type=float, default=0.25, help="of the expected accuracy, or the demo fails")
    demo.add_argument("--seed", type=int, default=0)
    demo.set_defaults(run=run_demo)
    return parser


def json_dictionary(text: str) -> dict[str, Any]:
    """An argument that is a JSON dictionary; another one is a mistake that argparse reports."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON dictionary such as '{{\"enforce_eager\": true}}'")
    return value


def run_grpo(args: argparse.Namespace) -> int:
    """`trl-qurl grpo`: whatever follows is for TRL's own argument parser."""
    from trl_qurl.recipes.grpo import parse_arguments, train

    trainer = train(*parse_arguments(args.further))
    trainer.accelerator.print(f"Policy saved to {trainer.args.output_dir}")
    return 0


def run_ppo(args: argparse.Namespace) -> int:
    """`trl-qurl ppo`: whatever follows is for TRL's own argument parser."""
    from trl_qurl.recipes.ppo import parse_arguments, train

    trainer = train(*parse_arguments(args.further))
    trainer.accelerator.print(f"Policy saved to {trainer.args.output_dir}, its critic to critic/ in it")
    return 0


def run_quantize(args: argparse.Namespace) -> int:
    """`trl-qurl quantize`: the checkpoint that vLLM starts from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_qurl.quantization import write_checkpoint
    from trl_qurl.recipes.arguments import check_model

    check_model(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    write_checkpoint(
        model, tokenizer, args.scheme, args.output_dir, ignore=tuple(args.ignore), quantizer=args.quantizer
    )
    print(f"{args.scheme} checkpoint written to {args.output_dir}")
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """`trl-qurl serve`: prepare the checkpoint, then become vLLM's own server."""
    from trl_qurl.recipes.arguments import check_model
    from trl_qurl.rollout import launch

    check_model(args.model)
    launch.require_vllm()
    model = launch.resolve_model(args.model)
    if args.scheme != "none":
        model = str(launch.starting_checkpoint(model, args.scheme, args.ignore))
    if warning := launch.exposure_warning(args.host, args.further):
        print(f"trl-qurl: {warning}", file=sys.stderr)
    launch.become_server(launch.server_command(model, args.host, args.port, args.further))
    return 0


def run_eval(args: argparse.Namespace) -> int:
    """`trl-qurl eval`: exit status 2 if something is missing or does not fit."""
    from trl_qurl.evaluation.job import Sampling
    from trl_qurl.evaluation.run import RESULTS_NAME, evaluate, require_packages
    from trl_qurl.recipes.arguments import check_model

    check_model(args.model)
    require_packages()
    output_dir = args.output_dir or Path(f"eval-{Path(args.model).name}")
    sampling = Sampling(args.samples, not args.no_greedy, args.temperature, args.top_p, args.max_tokens, args.seed)
    results = evaluate(
        args.model,
        args.tasks.split(","),
        output_dir,
        sampling,
        args.schemes.split(","),
        args.limit,
        args.ignore,
        args.engine_kwargs,
    )
    from rich.console import Console

    from trl_qurl.evaluation.results import build_table

    Console().print(build_table(results, args.model))
    print(f"Answers and figures: {output_dir / RESULTS_NAME}")
    return 0


def run_bench(args: argparse.Namespace) -> int:
    """`trl-qurl bench`: exit status 0 whatever the advice is."""
    from rich.console import Console

    from trl_qurl.bench.run import bench, write_bench
    from trl_qurl.bench.table import build_table, sentences
    from trl_qurl.bench.workload import Workload
    from trl_qurl.recipes.arguments import check_model

    workload = Workload(
        args.prompt_len,
        args.completion_len,
        args.batch,
        args.generations,
        args.train_batch,
        args.updates,
        not args.no_gradient_checkpointing,
    )
    check_model(args.model)
    schemes = args.schemes.split(",") if args.schemes else None
    console = Console()
    result = bench(args.model, workload, schemes, args.quick, args.ignore, args.engine_kwargs, console.print)
    console.print(build_table(result))
    for line in sentences(result):
        console.print(line)
    if args.output:
        write_bench(result, args.output)
        print(f"Figures: {args.output}")
    return 0


def run_report(args: argparse.Namespace) -> int:
    """`trl-qurl report`: a page, and its pictures beside it."""
    from trl_qurl.report import write_report

    report = write_report(args.runs, args.output)
    for note in report.notes:
        print(f"trl-qurl: note: {note}", file=sys.stderr)
    print(
        f"Report: {report.page}\nPictures: {report.pictures[0].parent}"
        if report.pictures
        else f"Report: {report.page}"
    )
    return 0


def run_demo(args: argparse.Namespace) -> int:
    """`trl-qurl demo`: exit status 1 if the policy did not learn enough."""
    from trl_qurl.demo.run import run_demo as run

    schemes = {"int8": "int8", "fp8": "fp8", "none": None}
    result = run(
        schemes[args.scheme],
        args.output_dir,
        args.rollouts,
        args.required_rise,
        args.seed,
        algorithm=args.algorithm,
        compared_schemes=() if args.compare is None else (schemes[args.compare],),
    )
    print(f"Log: {result.log_path}\nPicture: {result.figure_path}")
    if result.shortfall is not None:
        print(f"trl-qurl: the demo failed: {result.shortfall}", file=sys.stderr)
        return 1
    return 0
