"""What quantized rollouts do to the training of a real chat model, SmolLM2-135M-Instruct.

    python benchmarks/real_model.py MODEL                            # all that is missing, one run after the other
    python benchmarks/real_model.py MODEL --arms int8_acr --seeds 0
    python benchmarks/real_model.py --table                          # what there is, and the contrasts

Each run is a process of its own, whose short log goes to `benchmarks/results/real_model/TASK/`. A run that is there is
not made again, so an interrupted study goes on where it was. On a CPU, one process per core (`taskset -c 0`, and
`taskset -c 1` with other arms) makes a fifth more runs than one process on two cores.
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
KEPT = {"quantization_ignore": ["lm_head", "auto"]}
FLOAT32_CODES = "quantizes the float32 weights, which autocast rounds to bfloat16 before it computes"
RATE = "factor of the learning rate"
LORA = "adapter"
BF16 = {"rollout_quantization": None, "objective": "naive"}
ARMS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "int8_plain_naive": {"objective": "naive", **PLAIN},
    "int8_plain_tis": {"objective": "tis", **PLAIN},
    "int8_plain_acr": {"objective": "acr", **PLAIN},
    "int8_plain_quantized_ratio": {"objective": "quantized_ratio", **PLAIN},
    "int8_naive": {"objective": "naive"},
    "int8_tis": {"objective": "tis"},
    "int8_acr": {"objective": "acr"},
    "int8_kept_acr": {"objective": "acr", **KEPT},
    "int8_plain_decoupled": {"objective": "decoupled", **PLAIN},
    "int8_plain_geometric_mask": {"objective": "geometric_mask", **PLAIN},
    "int8_plain_icepop": {"objective": "icepop", **PLAIN},
    "int8_float32_codes_naive": {"objective": "naive", FLOAT32_CODES: True, **PLAIN},
    "int8_float32_codes_acr": {"objective": "acr", FLOAT32_CODES: True, **PLAIN},
    "int8_float32_codes_quantized_ratio": {"objective": "quantized_ratio", FLOAT32_CODES: True, **PLAIN},
    "int8_forward": {"objective": "naive", "training_forward": "quantized"},
    "int8_acr_uaq": {"objective": "acr", "uaq_scale": 1.5},
    "int8_acr_rate": {"objective": "acr", RATE: 1.5},
    "int8_rounded_base": {"objective": "acr", "round_base": True, LORA: True, RATE: 20.0},
    "bf16_half_rate": {**BF16, RATE: 0.5},
    "bf16_double_rate": {**BF16, RATE: 2.0},
    "bf16_triple_rate": {**BF16, RATE: 3.0},
}
CONTRASTS = [
    *((arm, "bf16") for arm in ("int8_plain_naive", "int8_plain_acr", "int8_naive", "int8_acr", "int8_forward")),
    ("int8_plain_quantized_ratio", "int8_plain_naive"),
    ("int8_plain_tis", "int8_plain_naive"),
    ("int8_plain_acr", "int8_plain_tis"),
    ("int8_plain_decoupled", "int8_plain_tis"),
    ("int8_plain_geometric_mask", "int8_plain_tis"),
    ("int8_plain_icepop", "int8_plain_tis"),
    ("int8_naive", "int8_plain_naive"),
    ("int8_tis", "int8_naive"),
    ("int8_acr", "int8_tis"),
    ("int8_acr", "int8_plain_acr"),
    ("int8_kept_acr", "int8_acr"),
    ("int8_acr_uaq", "int8_acr_rate"),
]
SHOWN = {
    "bf16": ("16-bit rollouts", "#555555", "-"),
    "int8_acr": ("INT8, the default", "#0072B2", "-"),
    "int8_plain_naive": ("INT8, neither smoothed nor corrected", "#E69F00", "--"),
    "int8_plain_quantized_ratio": ("INT8, not smoothed, quantized_ratio", "#D55E00", "-."),
}
ROLLOUTS = 40


def main() -> None:
    """Make the runs that are missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory of the model")
    parser.add_argument("--task", default="arithmetic", help="a task of chat_tasks.py (default: arithmetic)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what there is, and stop")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what there is, and stop")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    directory = args.output / args.task
    if args.one:
        train(args.model, args.task, args.one[0], int(args.one[1]), args.rollouts, directory)
    elif args.picture:
        draw(read_arms(directory), args.picture)
    elif not args.table:
        for seed in args.seeds:
            for arm in args.arms:
                if not place(directory, arm, seed).exists():
                    run_child(arm, seed)
    if not args.one and not args.picture:
        arms = read_arms(directory)
        print(arm_table(arms), contrast_table(arms), sep="\n\n")


def place(directory: Path, arm: str, seed: int) -> Path:
    """The short log of one run."""
    return directory / f"{arm}-seed{seed}.jsonl.gz"


def run_child(arm: str, seed: int) -> None:
    """One run in a process of its own, whose engine ends with it; what it prints is shown only if it fails."""
    from trl_qurl.lab.demo.run import ENVIRONMENT

    print(f"{arm}, seed {seed}", flush=True)
    command = [sys.executable, *sys.argv, "--one", arm, str(seed)]
    done = subprocess.run(command, env={**ENVIRONMENT, **os.environ}, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  FAILED with exit status {done.returncode}:\n{done.stderr[-2000:]}", flush=True)


def train(model: str, task_name: str, arm: str, seed: int, rollouts: int, output: Path) -> None:
    """Train one arm with one seed, and keep its short log."""
    sys.path.insert(0, str(ROOT))
    import torch
    from datasets import Dataset

    from benchmarks.chat_tasks import TASKS
    from benchmarks.objectives.one_run import write_short_log
    from benchmarks.provenance import provenance
    from trl_qurl import QuRLGRPOTrainer
    from trl_qurl.cli.allocator import keep_freed_memory
    from trl_qurl.lab.demo.chat import build_chat_config
    from trl_qurl.rollout import preparation
    from trl_qurl.trainers.run_log import read_run

    keep_freed_memory()
    task = TASKS[task_name]
    settings: dict[str, Any] = {"rollout_quantization": "int8", **ARMS[arm]}
    if settings.pop(FLOAT32_CODES, False):
        preparation.AUTOCAST.clear()
    settings["learning_rate"] = task.learning_rate * settings.pop(RATE, 1.0)
    adapter = None
    if settings.pop(LORA, False):
        from peft import LoraConfig

        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    settings |= {
        "per_device_train_batch_size": task.completions // task.updates,
        "steps_per_generation": task.updates,
        "logging_steps": task.updates,
        "max_steps": rollouts * task.updates,
        "max_completion_length": task.longest,
        "vllm_max_model_length": 128 + task.longest,
        "weight_metrics_interval": 0,
    }

    def reward(completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
        return [task.reward(turns[0]["content"], right) for turns, right in zip(completions, answer, strict=True)]

    found = provenance(torch.device("cpu"), measured="trl_qurl")
    with tempfile.TemporaryDirectory() as directory:
        scheme = settings.pop("rollout_quantization")
        config = build_chat_config(scheme, Path(directory), rollouts, seed, **settings)
        prompts, answers = zip(*task.learned, strict=True)
        data = Dataset.from_dict({"prompt": list(prompts), "answer": list(answers)})
        trainer = QuRLGRPOTrainer(
            model=model, reward_funcs=reward, args=config, train_dataset=data, peft_config=adapter
        )
        trainer.train()
        measured = {
            "full_precision": accuracy(task, answer(trainer, task, sampled=True)),
            "full_precision_greedy": accuracy(task, answer(trainer, task, sampled=False)),
            "engine": accuracy(task, answer_by_engine(trainer, task, sampled=True)),
            "engine_greedy": accuracy(task, answer_by_engine(trainer, task, sampled=False)),
        }
        rows = read_run(directory).rows
    names = ("objective", "learning_rate", "max_steps", "seed", "quantization_ignore", "per_device_train_batch_size")
    kept: dict[str, Any] = {name: getattr(config, name) for name in names}
    kept |= {"arm": arm, "task": task_name, "rollout_quantization": scheme, **measured, **found}
    write_short_log(kept, rows, place(output, arm, seed))


def answer(trainer: Any, task: Any, sampled: bool) -> list[list[str]]:
    """What the float32 weights say to the questions that are held out: several answers each, or the greedy one."""
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
            **inputs, max_new_tokens=task.longest, do_sample=sampled, num_return_sequences=count, **sampling
        )
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [texts[start : start + count] for start in range(0, len(texts), count)]


def answer_by_engine(trainer: Any, task: Any, sampled: bool) -> list[list[str]]:
    """The same by the engine that makes the rollouts, after a sync of the weights."""
    tokenizer, generation = trainer.processing_class, trainer.vllm_generation
    messages = [messages for messages, _ in task.held_out]
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    count = task.samples if sampled else 1
    generation.sync_weights()
    generation.temperature = float(sampled)
    repeated = [prompt for prompt in prompts for _ in range(count)]
    completions = generation.generate(prompts=repeated, images=None, num_generations=count)[1]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return [texts[start : start + count] for start in range(0, len(texts), count)]


def accuracy(task: Any, texts: list[list[str]]) -> float:
    """Mean reward of answers to the questions that are held out."""
    return mean(
        task.reward(text, right) for given, (_, right) in zip(texts, task.held_out, strict=True) for text in given
    )


def read_arms(directory: Path) -> dict[str, dict[int, Any]]:
    """Read the stored runs, by arm and seed."""
    sys.path.insert(0, str(ROOT))
    from trl_qurl.trainers.run_log import read_run

    arms = {}
    for arm in ARMS:
        runs = [read_run(path) for path in sorted(directory.glob(f"{arm}-seed*.jsonl.gz"))]
        if runs:
            arms[arm] = {run.settings["seed"]: run for run in runs}
    return arms


def arm_table(arms: dict[str, dict[int, Any]]) -> str:
    """One row per arm: means over seeds, with half a 95 % interval (Student's t) for accuracy and reward."""
    from benchmarks.objectives.summary import markdown, plus_minus, stated

    headings = ("arm", "seeds", *MEASURES, "KL, first", "last ten", "largest")
    lines = []
    for arm, by_seed in arms.items():
        runs = list(by_seed.values())
        kl = [[row["mismatch/kl_k3"] for row in rollouts(run)] for run in runs]
        every = [row for run in runs for row in rollouts(run)]
        lines.append(
            (
                arm,
                str(len(runs)),
                *(plus_minus(stated(measure(run) for run in runs)) for measure in MEASURES.values()),
                f"{mean(each[0] for each in kl):.4f}",
                f"{mean(value for each in kl for value in each[-10:]):.4f}",
                f"{max(map(max, kl)):.4f}",
                f"{max(row['mismatch/ratio_max'] for row in every):.1f}",
                f"{max(row['mismatch/capped_share'] for row in every):.2%}",
                f"{min(row['mismatch/ess'] for row in every):.2f}",
                f"{mean(map(seconds, every)):.1f}",
            )
        )
    return markdown((*headings, "largest ρ", "ρ > C at most", "least ESS", "s of a rollout"), lines)


def rollouts(run: Any) -> list[dict[str, Any]]:
    """The rows of a run, one per rollout."""
    return [row for row in run.rows if "mismatch/kl_k3" in row]


def seconds(row: dict[str, Any]) -> float:
    """Generation, sync and scoring of a rollout, and its updates."""
    return row["time/generate_s"] + row["time/sync_s"] + row["time/logps_s"] + 4 * row["time/update_s"]


MEASURES: dict[str, Any] = {
    "reward, first 20": lambda run: mean(row["reward"] for row in rollouts(run)[:20]),
    "last ten": lambda run: mean(row["reward"] for row in rollouts(run)[-10:]),
    "accuracy": lambda run: run.settings["full_precision"],
    "by the engine": lambda run: run.settings["engine"],
}


def contrast_table(arms: dict[str, dict[int, Any]]) -> str:
    """Differences in accuracy, paired by seed, with Holm's correction over all of them."""
    from benchmarks.objectives.contrasts import holm, p_value
    from benchmarks.objectives.summary import markdown, plus_minus, stated

    found = {}
    for ours, theirs in CONTRASTS:
        seeds = sorted(arms.get(ours, {}).keys() & arms.get(theirs, {}).keys())
        if seeds:
            found[f"{ours} − {theirs}"] = [
                [measure(arms[ours][seed]) - measure(arms[theirs][seed]) for seed in seeds]
                for measure in MEASURES.values()
            ]
    p_values = [p_value(by_measure[-2]) for by_measure in found.values()]
    lines = [
        (name, str(len(values[1])), *(plus_minus(stated(each)) for each in values), f"{p:.3f}", f"{corrected:.2f}")
        for (name, values), p, corrected in zip(found.items(), p_values, holm(p_values), strict=True)
    ]
    return markdown(("difference", "seeds", *MEASURES, "p (accuracy)", "Holm's p"), lines)


def draw(arms: dict[str, dict[int, Any]], path: Path) -> None:
    """Draw reward and KL over the rollouts: one line per arm, the mean of its seeds over five rollouts."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), dpi=160, layout="constrained")
    panels = (
        ("reward", "Reward", "share of right answers"),
        ("mismatch/kl_k3", "KL(engine ‖ policy)", "nats per token"),
    )
    for axes, (metric, title, unit) in zip(figure.subplots(1, 2), panels, strict=True):
        for arm, (label, color, dashes) in SHOWN.items():
            curves = np.mean([[row[metric] for row in rollouts(run)] for run in arms[arm].values()], axis=0)
            smoothed = np.convolve(curves, np.ones(5) / 5, mode="valid")
            axes.plot(np.arange(3, len(smoothed) + 3), smoothed, dashes, color=color, linewidth=2, label=label)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("rollout")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylim(0, 1)
    figure.axes[1].set_yscale("log")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(path)


if __name__ == "__main__":
    main()
