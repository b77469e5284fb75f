"""Train a real chat model, SmolLM2-135M-Instruct, with and without quantized rollouts.

    python benchmarks/real_model.py MODEL      # every missing run, one after the other
    python benchmarks/real_model.py MODEL --arms int8_acr --seeds 0
    python benchmarks/real_model.py MODEL --arms bf16 int8_acr --updates 1
    python -m benchmarks.real_model_tables     # results so far

Each run has its own process and writes a short log to `benchmarks/results/real_model/TASK/`, or
`TASK-1-update/` with `--updates 1`. Existing logs are skipped, so an interrupted study resumes at
the first missing run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean as mean
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "real_model"
PLAIN = {"smooth_activations": False}
FLOAT32_CODES = (
    "quantizes the float32 weights, which autocast rounds to bfloat16 before it computes"
)
RATE = "factor of the learning rate"
LORA = "adapter"
OTHER_SEEDS = "seeds that no other arm has"
COARSE = ("int6", "int4")  # codes of few bits, in the INT8 kernel (`objectives.coarse`)
SWITCHES = "switches to tis before rollout 21"
BF16 = {"rollout_quantization": None, "objective": "naive"}
EXPLORING = {
    "naive": {"objective": "naive"},
    "tis": {"objective": "tis"},
    "naive_then_tis": {"objective": "naive", SWITCHES: True},
}
ARMS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "bf16_again": {**BF16, OTHER_SEEDS: 1000},
    "int8_plain_naive": {"objective": "naive", **PLAIN},
    "int8_plain_acr": {"objective": "acr", **PLAIN},
    "int8_plain_quantized_ratio": {"objective": "quantized_ratio", **PLAIN},
    "int8_naive": {"objective": "naive"},
    "int8_tis": {"objective": "tis"},
    "int8_acr": {"objective": "acr"},
    "int8_float32_codes_quantized_ratio": {
        "objective": "quantized_ratio",
        FLOAT32_CODES: True,
        **PLAIN,
    },
    # a usual rate, not searched
    "int8_merged_adapter": {"objective": "acr", LORA: True, RATE: 20.0},
    "int8_rounded_base": {"objective": "acr", "round_base": True, LORA: True, RATE: 20.0},
    "bf16_triple_rate": {**BF16, RATE: 3.0},
    "int8_triple_rate": {RATE: 3.0},
    # Before training: what a format does to the answers.
    "bf16_untrained": {**BF16, RATE: 0.0},
    "int8_untrained": {RATE: 0.0},
    "w4a16_untrained": {"rollout_quantization": "w4a16", RATE: 0.0},
    "w4a16_rounded_untrained": {
        "rollout_quantization": "w4a16",
        "round_base": True,
        LORA: True,
        RATE: 0.0,
    },
    # Does rounding help to explore?
    **{
        f"{scheme}_{name}": {"rollout_quantization": scheme, **settings}
        for scheme in COARSE
        for name, settings in EXPLORING.items()
    },
}
ROLLOUTS = 40
UPDATES = 4  # per rollout, unless the command says otherwise


def main(argv: list[str] | None = None) -> int:
    """Make the runs that are missing, and return how many failed."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.chat_tasks import TASKS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of the model")
    parser.add_argument(
        "--task", default="arithmetic", choices=TASKS, help="a task (default: arithmetic)"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    parser.add_argument(
        "--updates",
        type=int,
        choices=(1, UPDATES),
        default=UPDATES,
        help="updates per rollout (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not (Path(args.model) / "config.json").is_file():
        parser.error(f"{args.model} is not the directory of a model: it has no config.json.")
    directory = args.output / runs_of(args.task, args.updates)
    if args.one:
        arm, seed = args.one[0], int(args.one[1])
        train(args.model, args.task, arm, seed, args.rollouts, args.updates, directory)
        return 0
    from benchmarks.provenance import require_exact_int8

    formats = {ARMS[arm].get("rollout_quantization", "int8") for arm in args.arms}
    if formats & {"int8", *COARSE}:
        require_exact_int8()
    missing = [
        (arm, seed)
        for seed in args.seeds
        for arm in args.arms
        if not place(directory, arm, seed).exists()
    ]
    return sum(not run_child(arm, seed) for arm, seed in missing)


def runs_of(task: str, updates: int) -> str:
    """Return the name of the directory with the logs of a task."""
    return task if updates == UPDATES else f"{task}-{updates}-update"


def place(directory: Path, arm: str, seed: int) -> Path:
    """Return the path of a run's short log."""
    return directory / f"{arm}-seed{seed}.jsonl.gz"


def run_child(arm: str, seed: int) -> bool:
    """Run one arm in a separate process, which frees the engine;
    show its output only if it fails.
    """
    from trl_qurl.lab.demo.run import ENVIRONMENT

    print(f"{arm}, seed {seed}", flush=True)
    command = [sys.executable, *sys.argv, "--one", arm, str(seed)]
    done = subprocess.run(
        command, env={**ENVIRONMENT, **os.environ}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"  FAILED with exit status {done.returncode}:\n{done.stderr[-2000:]}", flush=True)
    return done.returncode == 0


def train(
    model: str, task_name: str, arm: str, seed: int, rollouts: int, updates: int, output: Path
) -> None:
    """Train one arm with one seed, and keep its short log."""
    sys.path.insert(0, str(ROOT))
    import torch
    from datasets import Dataset

    from benchmarks.chat_tasks import TASKS
    from benchmarks.objectives.coarse import add_coarse_schemes
    from benchmarks.objectives.one_run import write_short_log
    from benchmarks.provenance import provenance
    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
    from trl_qurl.lab.device import keep_freed_memory
    from trl_qurl.lab.runs import read_run
    from trl_qurl.rollout import preparation

    keep_freed_memory()
    task = TASKS[task_name]
    settings: dict[str, Any] = {"rollout_quantization": "int8", **ARMS[arm]}
    switches = settings.pop(SWITCHES, False)
    if settings["rollout_quantization"] in COARSE:
        add_coarse_schemes()
        # limits and checks are for the package's own formats
        settings |= {"mismatch_guard": "off", "sync_check_interval": 0}
    if settings.pop(FLOAT32_CODES, False):
        preparation.AUTOCAST.clear()
    settings["learning_rate"] = task.learning_rate * settings.pop(RATE, 1.0)
    adapter = None
    if settings.pop(LORA, False):
        from peft import LoraConfig

        adapter = LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    settings |= {
        "max_completion_length": task.longest,
        "vllm_max_model_length": 128 + task.longest,
    }

    def reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
        return [
            task.reward(turns[0]["content"], right)
            for turns, right in zip(completions, answer, strict=True)
        ]

    found = provenance(torch.device("cpu"), measured="trl_qurl")
    with tempfile.TemporaryDirectory() as directory:
        noise = seed + settings.pop(OTHER_SEEDS, 0)
        shared = training_settings(rollouts, updates)
        config = QuRLGRPOConfig(directory, seed=noise, **shared, **settings)
        prompts, answers = zip(*task.learned, strict=True)
        data = Dataset.from_dict({"prompt": list(prompts), "answer": list(answers)})
        trainer = QuRLGRPOTrainer(
            model=model, reward_funcs=reward, args=config, train_dataset=data, peft_config=adapter
        )
        if switches:
            trainer.add_callback(switch_to_tis(20 * updates))
        trainer.train()
        measured = {
            "full_precision": accuracy(task, answer(trainer, task, sampled=True)),
            "full_precision_greedy": accuracy(task, answer(trainer, task, sampled=False)),
            "engine": accuracy(task, answer_by_engine(trainer, task, sampled=True)),
            "engine_greedy": accuracy(task, answer_by_engine(trainer, task, sampled=False)),
        }
        rows = read_run(directory).rows
    names = (
        "objective",
        "learning_rate",
        "max_steps",
        "seed",
        "quantization_ignore",
        "per_device_train_batch_size",
        "steps_per_generation",
    )
    kept: dict[str, Any] = {name: getattr(config, name) for name in names}
    kept |= {
        "arm": arm,
        "seed": seed,
        "task": task_name,
        "rollout_quantization": settings["rollout_quantization"],
        **measured,
        **found,
    }
    write_short_log(kept, rows, place(output, arm, seed))


def switch_to_tis(after: int) -> Any:
    """Return a callback that gives the objective a correction after so many updates."""
    from transformers import TrainerCallback

    class Switch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == after:
                args.objective = "tis"

    return Switch()


def training_settings(rollouts: int, updates: int) -> dict[str, Any]:
    """Return what all arms share: rollouts of 32 completions, in as many batches as updates."""
    from trl_qurl.lab.device import cpu_settings

    return {
        "num_generations": 8,
        "steps_per_generation": updates,
        "per_device_train_batch_size": 32 // updates,
        "max_steps": rollouts * updates,
        "logging_steps": updates,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,  # it only slows down small policies
        "model_init_kwargs": {"dtype": "float32"},
        **cpu_settings(),
        "vllm_engine_kwargs": {"enforce_eager": True, "use_tqdm_on_load": False},
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def answer(trainer: Any, task: Any, sampled: bool) -> list[list[str]]:
    """Answer the held-out questions with the float32 weights: several samples each, or one greedy
    answer.
    """
    import torch

    model, tokenizer = trainer.model, trainer.processing_class
    tokenizer.padding_side = "left"
    inputs = tokenizer.apply_chat_template(
        [messages for messages, _ in task.held_out],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    count = task.samples if sampled else 1
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
    torch.manual_seed(0)
    model.eval()
    with torch.inference_mode():
        tokens = model.generate(
            **inputs,
            max_new_tokens=task.longest,
            do_sample=sampled,
            num_return_sequences=count,
            **sampling,
        )
    texts = tokenizer.batch_decode(
        tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return [texts[start : start + count] for start in range(0, len(texts), count)]


def answer_by_engine(trainer: Any, task: Any, sampled: bool) -> list[list[str]]:
    """Answer the held-out questions with the rollout engine, after syncing the weights."""
    tokenizer, generation = trainer.processing_class, trainer.vllm_generation
    messages = [messages for messages, _ in task.held_out]
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    count = task.samples if sampled else 1
    generation.sync_weights()
    generation.temperature = float(sampled)
    repeated = [prompt for prompt in prompts for _ in range(count)]
    completions = generation.generate(prompts=repeated, images=None, num_generations=count)[1]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return [texts[start : start + count] for start in range(0, len(texts), count)]


def accuracy(task: Any, texts: list[list[str]]) -> float:
    """Return the mean reward of answers to the held-out questions."""
    return mean(
        task.reward(text, right)
        for given, (_, right) in zip(texts, task.held_out, strict=True)
        for text in given
    )


if __name__ == "__main__":
    sys.exit(main())
