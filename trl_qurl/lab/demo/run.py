"""The demonstration from start to end: warm start, measure, train with quantized rollouts, measure again, draw."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trl_qurl.lab.demo.algorithms import build_config, build_trainer, critic_shortfall

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from trl_qurl import QuRLGRPOTrainer
    from trl_qurl.lab.demo.record import Row

HELD_OUT_PROBLEMS = 512
LOG_NAME, FIGURE_NAME = "log.csv", "demo.png"

COMPARED_ROLLOUTS = 10
COMPARED_METRICS = (
    ("expected_accuracy", "full-precision policy, expected"),
    ("greedy_accuracy", "full-precision policy, greedy"),
    ("critic/explained_variance", "critic, explained variance"),
)

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about speed on CPU
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes half the memory of the machine
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, so that weights are handed over and not sent
    "TOKENIZERS_PARALLELISM": "false",
}


class Measured(NamedTuple):
    """Shares of 512 held-out problems."""

    expected: float  # of the full-precision policy, sampling: exact, no noise
    greedy: float  # of the full-precision policy, greedy decoding
    actor_greedy: float  # of the actor that makes the rollouts, greedy decoding in the engine


class DemoResult(NamedTuple):
    """What the demonstration found and where it left it."""

    before: Measured
    after: Measured
    shortfall: str | None  # why it counts as failed, or None
    log_path: Path
    figure_path: Path


def run_demo(
    scheme: str | None = "int8",
    output_dir: str | Path = "demo-output",
    rollouts: int = 120,
    required_rise: float = 0.25,
    seed: int = 0,
    cache_dir: Path | None = None,
    algorithm: str = "grpo",
    compared_schemes: tuple[str | None, ...] = (),
) -> DemoResult:
    """Warm-start, train and measure; prints progress and a table, writes `log.csv` and `demo.png` to `output_dir`.

    Args:
        scheme: name of a format, or `None` for rollouts that are not quantized.
        output_dir: where the log and the picture go.
        rollouts: each makes 256 completions and four updates.
        required_rise: rise of the expected accuracy below which the result has a `shortfall`.
        seed: of the reinforcement learning; the warm start has its own.
        cache_dir: where the warm start is kept; default `cache_directory()`.
        algorithm: `"grpo"`, or `"ppo"` for a critic in the place of groups.
        compared_schemes: formats to train with as well, one after the other, drawn into the same picture.
    """
    for name, value in ENVIRONMENT.items():  # before vLLM is imported, which reads them once
        os.environ.setdefault(name, value)
    # Raised by vLLM about its own use of torch; nobody who runs this can act on it.
    warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed.reduce_op`")
    require_drawing()
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from trl_qurl.lab.demo.figure import draw_figure
    from trl_qurl.lab.demo.record import RolloutRecorder, write_csv
    from trl_qurl.lab.demo.task import build_tokenizer, encode_problems, sample_problems

    if rollouts < 1:
        raise ValueError(f"rollouts={rollouts} trains nothing; give at least 1.")
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()  # its bars for reading and writing a tiny model hide the demo's own
    console = Console()
    name = actor_name(scheme)

    config = build_config(algorithm, scheme, output_dir, rollouts, seed)  # refuses a bad scheme before the warm start
    policy_dir = prepare_policy(cache_dir, console)
    held_out = encode_problems(sample_problems(HELD_OUT_PROBLEMS, seed=0, held_out=True), build_tokenizer())
    # Before the engine of this run, which takes memory, a port and some of the environment for itself.
    compared = {}
    for other in compared_schemes:
        console.print(f"First the same with {actor_name(other)} rollouts, for comparison")
        compared[actor_name(other)] = train_elsewhere(algorithm, other, output_dir, rollouts, seed)
    console.print(f"Starting vLLM with the {name} actor")
    trainer = build_trainer(policy_dir, config)
    before = measure(trainer, held_out)
    recorder = RolloutRecorder(held_out, rollouts, console)
    trainer.add_callback(recorder)
    trainer.train()
    after = measure(trainer, held_out)

    log_path, figure_path = output_dir / LOG_NAME, output_dir / FIGURE_NAME
    write_csv(recorder.rows, log_path)
    print_table(before, after, name, console)
    runs = {name: recorder.rows, **compared}
    draw_figure(runs, figure_path, algorithm)
    if len(runs) > 1:
        print_comparison(runs, console)
    shortfall = find_shortfall(before, after, required_rise) or critic_shortfall(recorder.rows)
    return DemoResult(before, after, shortfall, log_path, figure_path)


def train_elsewhere(algorithm: str, scheme: str | None, output_dir: Path, rollouts: int, seed: int) -> list[Row]:
    """The rows of another run, in a process of its own: an engine does not leave the one it was started in.

    Raises:
        ChildProcessError: that run failed; what it printed says why.
    """
    from trl_qurl.lab.demo.record import read_csv

    directory = output_dir / actor_name(scheme).lower()
    command = [sys.executable, "-m", "trl_qurl", "demo", "--algorithm", algorithm, "--scheme", scheme or "none"]
    command += ["--rollouts", str(rollouts), "--seed", str(seed), "--output-dir", str(directory)]
    (directory / LOG_NAME).unlink(missing_ok=True)  # of an earlier run
    # It is there to be compared with, whatever it reaches.
    done = subprocess.run([*command, "--required-rise", "-1"])
    if not (directory / LOG_NAME).is_file():
        raise ChildProcessError(
            f"The run to compare with failed with exit status {done.returncode}: {' '.join(command)}"
        )
    return read_csv(directory / LOG_NAME)


def require_drawing() -> None:
    """Fail at once if the packages that show the result are missing, and not after minutes of training."""
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError("The demo needs matplotlib and rich: run `pip install trl-qurl[demo]`.") from error


def actor_name(scheme: str | None) -> str:
    """The number format of the rollouts, as a reader knows it."""
    return scheme.upper() if scheme else "BF16"


def prepare_policy(cache_dir: Path | None, console: Console) -> Path:
    """Directory of the warm-started policy, trained under a progress bar if it is not cached."""
    from trl_qurl.lab.demo.record import progress_bar
    from trl_qurl.lab.demo.warm_start import WarmStartSettings, cached_warm_start
    from trl_qurl.quantization.cache import cache_directory

    settings = WarmStartSettings()
    with progress_bar(console, "accuracy {task.fields[accuracy]:.3f}") as bar:
        task = bar.add_task("Warm start, update", total=None, accuracy=0.0, visible=False)

        def show(update: int, accuracy: float) -> None:
            bar.update(task, completed=update, accuracy=accuracy, visible=True)

        policy_dir = cached_warm_start(settings, cache_dir or cache_directory(), show)
    console.print(f"Warm-started policy: {policy_dir}")
    return policy_dir


def measure(trainer: QuRLGRPOTrainer, problem_ids: Tensor) -> Measured:
    """Accuracy of the policy and of its actor as they stand, on encoded problems of shape (B, P + A)."""
    from trl_qurl.lab.demo.evaluate import measure_actor, measure_policy

    policy = measure_policy(trainer.model, problem_ids)
    return Measured(*policy, actor_greedy=measure_actor(trainer.vllm_generation, problem_ids))


def print_table(before: Measured, after: Measured, name: str, console: Console) -> None:
    """Print what was measured before and after."""
    from rich.table import Table

    table = Table(title=f"Three-digit addition, {HELD_OUT_PROBLEMS} held-out problems")
    table.add_column("accuracy")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    labels = ("full-precision policy, expected", "full-precision policy, greedy", f"{name} actor, greedy")
    for label, old, new in zip(labels, before, after, strict=True):
        table.add_row(label, f"{old:.3f}", f"{new:.3f}", f"{new - old:+.3f}")
    console.print(table)


def print_comparison(runs: dict[str, list[Row]], console: Console) -> None:
    """Print what the runs reached, side by side."""
    from rich.table import Table

    table = Table(title=f"Means of the last {COMPARED_ROLLOUTS} rollouts")
    table.add_column("metric")
    for name in runs:
        table.add_column(name, justify="right")
    for metric, label in COMPARED_METRICS:
        means = [mean_of_last(rows, metric) for rows in runs.values()]
        if None not in means:
            table.add_row(label, *(f"{mean:.3f}" for mean in means))
    console.print(table)


def mean_of_last(rows: list[Row], metric: str) -> float | None:
    """Mean of a metric over the last rollouts in which it was logged."""
    values = [row[metric] for row in rows[-COMPARED_ROLLOUTS:] if row.get(metric) is not None]
    return sum(values) / len(values) if values else None


def find_shortfall(before: Measured, after: Measured, required_rise: float) -> str | None:
    """Why the demonstration counts as failed, in one sentence, or `None`."""
    rise = after.expected - before.expected
    if rise >= required_rise:
        return None
    return (
        f"the expected accuracy of the full-precision policy went from {before.expected:.3f} to {after.expected:.3f}, "
        f"a change of {rise:+.3f} where at least +{required_rise:.2f} is required."
    )
