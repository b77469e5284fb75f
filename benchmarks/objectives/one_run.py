"""One run of the study: train one arm with one seed, and keep what the report and the tables need
of its log.
"""

import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.objectives.arms import Arm

KEPT = (
    "expected_accuracy",
    "greedy_accuracy",
    "quantized_expected_accuracy",
    "reward",
    "entropy",
    "grad_norm",
    "frac_reward_zero_std",
    "mismatch/kl_k1",
    "mismatch/kl_k3",
    "mismatch/ratio_max",
    "mismatch/capped_share",
    "mismatch/ess",
    "sampling/sampling_logp_difference/mean",
    "policy/approx_kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "acr/lifted_share",
    "acr/let_through_share",
    "time/quantize_s",
    "time/sync_s",
    "time/generate_s",
    "time/logps_s",
    "time/update_s",
    "step_time",
)
KEPT_SETTINGS = (
    "rollout_quantization",
    "objective",
    "uaq_scale",
    "learning_rate",
    "importance_cap",
    "steps_per_generation",
    "gradient_accumulation_steps",
    "per_device_train_batch_size",
    "num_generations",
    "max_steps",
    "updates_per_rollout",
    "algorithm",
    "seed",
    "weight_sync",
    "round_base",
    "smooth_activations",
)
DIGITS = 5
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def updates_of(arm: Arm) -> int:
    """Return the number of optimizer updates per rollout."""
    from trl_qurl.lab.demo.algorithms import UPDATES_PER_ROLLOUT

    batches = arm.changed.get("steps_per_generation", UPDATES_PER_ROLLOUT)
    return batches // arm.changed.get("gradient_accumulation_steps", 1)


def train_arm(
    arm: Arm, seed: int, policy_dir: Path, provenance: dict[str, Any], place: Path
) -> None:
    """Train, and write the shortened run log to `place`; a file that is there is complete."""
    from peft import LoraConfig

    from benchmarks.objectives.centering import center
    from benchmarks.objectives.coarse import add_coarse_schemes, coarsen_activations
    from benchmarks.objectives.in_flight import update_in_flight
    from benchmarks.objectives.recorder import BothPolicies
    from trl_qurl.lab.demo.algorithms import build_config, build_trainer
    from trl_qurl.lab.demo.record import RolloutRecorder
    from trl_qurl.lab.demo.task import build_tokenizer, encode_problems, sample_problems
    from trl_qurl.lab.runs import read_run
    from trl_qurl.quantization import SCHEMES
    from trl_qurl.quantization.formats import get_scheme

    # The limits of the guard are for the formats of the package (the coarse ones are added below),
    # and for rollouts that nothing delays.
    is_stale = arm.is_delayed or arm.is_updated_in_flight
    is_checked = arm.scheme in SCHEMES and not is_stale
    add_coarse_schemes()
    held_out = encode_problems(sample_problems(512, seed=0, held_out=True), build_tokenizer())
    updates = updates_of(arm)
    with tempfile.TemporaryDirectory() as output_dir:
        config = build_config(
            arm.algorithm,
            arm.scheme,
            Path(output_dir),
            arm.rollouts,
            seed + arm.seed_offset,
            **{
                "max_steps": arm.rollouts * updates,
                "logging_steps": updates,
                "mismatch_guard": "off",
                "smooth_activations": False,
                "sync_check_interval": 10**6 if is_checked else 0,
                **arm.changed,
            },
        )
        trainer = build_trainer(policy_dir, config, LoraConfig(**LORA) if arm.lora else None)
        if arm.activation_bits < 8:
            llm = trainer.vllm_generation.llm
            llm.apply_model(lambda model: coarsen_activations(model, arm.activation_bits))
        if arm.scheme is None or not arm.is_repeatable:
            recorder = RolloutRecorder(held_out, arm.rollouts)
        else:
            merges = arm.changed.get("weight_sync") != "adapter"
            recorder = BothPolicies(
                get_scheme(arm.scheme), merges, problem_ids=held_out, rollouts=arm.rollouts
            )
        if arm.is_delayed:
            delay(trainer.vllm_generation)
        if arm.is_updated_in_flight:
            update_in_flight(trainer, updates)
        if arm.listed:
            center(trainer, arm.listed)
        trainer.add_callback(recorder)
        trainer.train()
        run = read_run(output_dir)
    settings = {name: run.settings[name] for name in KEPT_SETTINGS if name in run.settings}
    settings |= {
        "activation_bits": arm.activation_bits,
        "is_delayed": arm.is_delayed,
        "is_updated_in_flight": arm.is_updated_in_flight,
        "centering": arm.listed,
        "arm": arm.name,
        **provenance,
    }
    settings |= {"seed": seed, "seed_offset": arm.seed_offset}
    write_short_log(settings, run.rows, place)


def delay(generation: Any) -> None:
    """Sample each rollout with the weights of the previous one: TRL's sync comes after the
    generation.
    """
    sync, generate = generation.sync_weights, generation.generate_from_sent

    def generate_first(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        sync()
        return output

    sync()
    generation.sync_weights, generation.generate = lambda: None, generate_first


def write_short_log(settings: dict[str, Any], rows: list[dict[str, Any]], place: Path) -> None:
    """One row per step with the `KEPT` metrics, to `DIGITS` significant digits, gzipped; written in
    one step.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        kept = {name: shortened(row[name]) for name in KEPT if row.get(name) is not None}
        if kept:
            by_step.setdefault(row["step"], {"step": row["step"]}).update(kept)
    lines = [json.dumps(content) for content in [{"settings": settings}, *by_step.values()]]
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_suffix(".tmp")
    draft.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))
    os.replace(draft, place)


def shortened(value: float) -> float:
    """The number to `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")
