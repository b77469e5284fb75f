"""The whole demo: warm start, measure, train with quantized rollouts, measure again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.lab.comparison import label
from trl_qurl.lab.demo.algorithms import build_config, build_trainer
from trl_qurl.lab.processes import ENGINE_ENVIRONMENT

if TYPE_CHECKING:
    from trl_qurl.lab.demo.outcome import Outcome

HELD_OUT_PROBLEMS = 512

ENVIRONMENT = {
    **ENGINE_ENVIRONMENT,
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes half of the machine's memory
}


def run_demo(
    scheme: str | None, output_dir: Path, rollouts: int, seed: int, algorithm: str
) -> Outcome:
    """Warm-start, train and measure, and write `run.jsonl` to `output_dir`.

    The arguments are the options of `trl-qurl demo`; `scheme` is `None` for 16-bit rollouts.
    """
    from trl_qurl.lab.demo.evaluate import answers_of_actor, measure_policy
    from trl_qurl.lab.demo.outcome import Outcome
    from trl_qurl.lab.demo.record import RolloutRecorder
    from trl_qurl.lab.demo.task import build_tokenizer, encode_problems, sample_problems
    from trl_qurl.lab.runs import read_run

    # This rejects a bad scheme before the warm start.
    config = build_config(algorithm, scheme, output_dir, rollouts, seed)
    policy_dir = prepare_policy()
    problems = sample_problems(HELD_OUT_PROBLEMS, seed=0, held_out=True)
    held_out = encode_problems(problems, build_tokenizer())
    name = label(scheme or "none")
    print(f"Starting vLLM: its rollouts compute with {name}, the policy learns with 32 bits")
    trainer = build_trainer(policy_dir, config)
    accuracy = measure_policy(trainer.model, held_out).expected
    before = answers_of_actor(trainer, held_out)
    trainer.add_callback(RolloutRecorder(held_out, rollouts))
    trainer.train()
    after = answers_of_actor(trainer, held_out)
    return Outcome(read_run(output_dir), accuracy, problems, before, after)


def prepare_policy() -> Path:
    """Return the directory of the warm-started policy, training it if it is not cached."""
    from trl_qurl.lab.demo.warm_start import WarmStartSettings, cached_warm_start
    from trl_qurl.quantization.files import cache_directory

    policy_dir = cached_warm_start(WarmStartSettings(), cache_directory())
    print(f"Warm-started policy: {policy_dir}")
    return policy_dir
