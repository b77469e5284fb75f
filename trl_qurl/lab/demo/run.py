"""The whole demo: warm start, measure, train with quantized rollouts, measure again, plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trl_qurl.lab.comparison import new_table
from trl_qurl.lab.demo.algorithms import build_config, build_trainer
from trl_qurl.lab.processes import ENGINE_ENVIRONMENT

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from trl_qurl.lab.demo.algorithms import Trainer

HELD_OUT_PROBLEMS = 512

ENVIRONMENT = {
    **ENGINE_ENVIRONMENT,
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes half of the machine's memory
}


class Measurement(NamedTuple):
    """Accuracies on 512 held-out problems."""

    expected: float  # full-precision policy, sampling: exact, no noise
    greedy: float  # full-precision policy, greedy decoding
    actor_greedy: float  # rollout actor, greedy decoding in the engine


def run_demo(
    scheme: str | None,
    output_dir: Path,
    rollouts: int,
    required_share: float,
    seed: int,
    algorithm: str,
) -> str | None:
    """Warm-start, train and measure; print a table, and write `run.jsonl` to `output_dir`.

    The arguments are the options of `trl-qurl demo`; `scheme` is `None` for BF16 rollouts. Returns
    why the demo failed, in one sentence, or `None`.
    """
    from rich.console import Console

    from trl_qurl.lab.demo.record import RolloutRecorder
    from trl_qurl.lab.demo.task import build_tokenizer, encode_problems, sample_problems

    console = Console()
    name = scheme.upper() if scheme else "BF16"
    # This rejects a bad scheme before the warm start.
    config = build_config(algorithm, scheme, output_dir, rollouts, seed)
    policy_dir = prepare_policy()
    problems = sample_problems(HELD_OUT_PROBLEMS, seed=0, held_out=True)
    held_out = encode_problems(problems, build_tokenizer())
    console.print(f"Starting vLLM with the {name} actor")
    trainer = build_trainer(policy_dir, config)
    before = measure(trainer, held_out)
    trainer.add_callback(RolloutRecorder(held_out, rollouts))
    trainer.train()
    after = measure(trainer, held_out)
    print_table(before, after, name, console)
    return find_shortfall(before, after, required_share)


def prepare_policy() -> Path:
    """Return the directory of the warm-started policy, training it if it is not cached."""
    from trl_qurl.lab.demo.warm_start import WarmStartSettings, cached_warm_start
    from trl_qurl.quantization.storage import cache_directory

    policy_dir = cached_warm_start(WarmStartSettings(), cache_directory())
    print(f"Warm-started policy: {policy_dir}")
    return policy_dir


def measure(trainer: Trainer, problem_ids: Tensor) -> Measurement:
    """Measure the current policy and its actor on encoded problems of shape (B, P + A)."""
    from trl_qurl.lab.demo.evaluate import measure_actor, measure_policy

    policy = measure_policy(trainer.model, problem_ids)
    return Measurement(*policy, actor_greedy=measure_actor(trainer.vllm_generation, problem_ids))


def print_table(before: Measurement, after: Measurement, name: str, console: Console) -> None:
    """Print the accuracies before and after training."""
    table = new_table(
        f"{HELD_OUT_PROBLEMS} held-out additions", "", ["accuracy"], ("before", "after", "change")
    )
    labels = (
        "full-precision policy, expected",
        "full-precision policy, greedy",
        f"{name} actor, greedy",
    )
    for label, old, new in zip(labels, before, after, strict=True):
        table.add_row(label, f"{old:.3f}", f"{new:.3f}", f"{new - old:+.3f}")
    console.print(table)


def find_shortfall(before: Measurement, after: Measurement, required_share: float) -> str | None:
    """Explain in one sentence why the policy did not learn enough; return `None` if it did."""
    # Warm starts end at different accuracies on different CPUs, so a share of the errors is judged.
    share = (after.expected - before.expected) / (1 - before.expected)
    if share >= required_share:
        return None
    return (
        f"the expected accuracy of the full-precision policy went from {before.expected:.3f} to "
        f"{after.expected:.3f}, which is {share:.0%} of its errors corrected; the demo requires at "
        f"least {required_share:.0%}."
    )
