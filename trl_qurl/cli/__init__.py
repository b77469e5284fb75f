"""The command `trl-qurl`: parse, call, print.

Everything heavy is imported inside the subcommand that needs it, so that `--help` answers at once. What a user can
cause (a missing file, a setting that does not fit, a part that is not installed) is printed as one line; with
`TRL_QURL_DEBUG=1` the traceback is shown instead.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trl_qurl.cli.noise import quiet, shows_everything
from trl_qurl.cli.options import build_parser
from trl_qurl.rollout.errors import RolloutError

USER_ERRORS = (ValueError, ImportError, OSError, RolloutError)  # OSError covers FileNotFoundError, ConnectionError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: 0, 1 if a demo fell short of its goal, 2 for a user's error."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could come next: `register-python-argcomplete` did that
        import argcomplete

        argcomplete.autocomplete(parser)
    args, further = parser.parse_known_args(argv)
    if args.command in ("grpo", "ppo", "serve"):
        args.further = further
    elif further:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    run = {
        "grpo": run_grpo,
        "ppo": run_ppo,
        "quantize": run_quantize,
        "serve": run_serve,
        "eval": run_eval,
        "bench": run_bench,
        "report": run_report,
        "demo": run_demo,
        "env": run_env,
    }
    quiet()
    try:
        return run[args.command](args)
    except USER_ERRORS as error:
        if shows_everything():
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"trl-qurl: error: {message}", file=sys.stderr)
        return 2


def run_grpo(args: argparse.Namespace) -> int:
    """`trl-qurl grpo`: whatever follows is for TRL's own argument parser."""
    from trl_qurl.lab.recipes.grpo import parse_arguments, train

    trainer = train(*parse_arguments(args.further))
    trainer.accelerator.print(f"Policy saved to {trainer.args.output_dir}")
    return 0


def run_ppo(args: argparse.Namespace) -> int:
    """`trl-qurl ppo`: whatever follows is for TRL's own argument parser."""
    from trl_qurl.lab.recipes.ppo import parse_arguments, train

    trainer = train(*parse_arguments(args.further))
    trainer.accelerator.print(f"Policy saved to {trainer.args.output_dir}, its critic to critic/ in it")
    return 0


def run_quantize(args: argparse.Namespace) -> int:
    """`trl-qurl quantize`: the checkpoint that vLLM starts from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_qurl.lab.recipes.arguments import check_model
    from trl_qurl.quantization import write_checkpoint

    check_model(args.model)
    print(f"Loading {args.model}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    print(f"Rounding its weights to {args.scheme.upper()} ({args.quantizer})", flush=True)
    write_checkpoint(
        model,
        tokenizer,
        args.scheme,
        args.output_dir,
        ignore=tuple(args.ignore),
        quantizer=args.quantizer,
        show_progress=True,
    )
    print(f"{args.scheme.upper()} checkpoint written to {args.output_dir}")
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """`trl-qurl serve`: prepare the checkpoint, then become vLLM's own server."""
    from trl_qurl.lab.recipes.arguments import check_model
    from trl_qurl.rollout.engine import launch

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
    from trl_qurl.lab.evaluation.job import Sampling
    from trl_qurl.lab.evaluation.run import RESULTS_NAME, evaluate, require_packages
    from trl_qurl.lab.recipes.arguments import check_model

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

    from trl_qurl.lab.evaluation.results import build_table

    Console().print(build_table(results, args.model))
    print(f"Answers and figures: {output_dir / RESULTS_NAME}")
    return 0


def run_bench(args: argparse.Namespace) -> int:
    """`trl-qurl bench`: exit status 0 whatever the advice is."""
    from rich.console import Console

    from trl_qurl.lab.bench.run import bench, write_bench
    from trl_qurl.lab.bench.table import build_table, sentences
    from trl_qurl.lab.bench.workload import Workload
    from trl_qurl.lab.recipes.arguments import check_model

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
    from trl_qurl.lab.report import write_report

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
    from trl_qurl.lab.demo.run import run_demo as run

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


def run_env(args: argparse.Namespace) -> int:
    """`trl-qurl env`: exit status 0 whatever was found."""
    from trl_qurl.lab.environment import describe_environment

    print(describe_environment())
    return 0
