"""What quantized rollouts do to the training of a real chat model: one-digit arithmetic with SmolLM2-135M-Instruct.

    python benchmarks/real_model.py MODEL                        # all that is missing, one run after the other
    python benchmarks/real_model.py MODEL --arms int8_acr --seeds 0 --rollouts 20
    python benchmarks/real_model.py MODEL --table                # what there is

Each run is `trl-qurl demo --model MODEL` with other settings (`trl_qurl/lab/demo/chat.py`), in a process of its own,
whose short log goes to `benchmarks/results/real_model/`. A run that is there is not made again, so an interrupted
study goes on where it was. The learning rate is that of the demonstration for all arms.
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
ARMS: dict[str, dict[str, Any]] = {
    "bf16": {"rollout_quantization": None, "objective": "naive"},
    "int8_acr": {"objective": "acr"},
    "int8_acr_float32_codes": {"objective": "acr", FLOAT32_CODES: True},
    "int8_plain_acr": {"objective": "acr", **PLAIN},
    "int8_kept_acr": {"objective": "acr", **KEPT},
    "int8_plain_naive": {"objective": "naive", **PLAIN},
    "int8_naive": {"objective": "naive"},
    "int8_plain_tis": {"objective": "tis", **PLAIN},
    "int8_tis": {"objective": "tis"},
    "int8_plain_quantized_ratio": {"objective": "quantized_ratio", **PLAIN},
    "int8_plain_decoupled": {"objective": "decoupled", **PLAIN},
    "int8_plain_geometric_mask": {"objective": "geometric_mask", **PLAIN},
    "int8_plain_icepop": {"objective": "icepop", **PLAIN},
    "int8_forward": {"objective": "naive", "training_forward": "quantized"},
}
ROLLOUTS = 40


def main() -> None:
    """Make the runs that are missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what there is, and stop")
    parser.add_argument("--one", nargs=2, metavar=("ARM", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        train(args.model, args.one[0], int(args.one[1]), args.rollouts, args.output)
    elif not args.table:
        for seed in args.seeds:
            for arm in args.arms:
                if not place(args.output, arm, seed).exists():
                    run_child(arm, seed)
    if not args.one:
        print_table(args.output)


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


def train(model: str, arm: str, seed: int, rollouts: int, output: Path) -> None:
    """Train one arm with one seed, and keep its short log."""
    sys.path.insert(0, str(ROOT))
    import torch

    from benchmarks.objectives.one_run import write_short_log
    from benchmarks.provenance import provenance
    from trl_qurl.cli.allocator import keep_freed_memory
    from trl_qurl.lab.demo.chat import answer_by_engine, answer_greedily, build_chat_config, build_chat_trainer
    from trl_qurl.rollout import preparation
    from trl_qurl.trainers.run_log import read_run

    keep_freed_memory()
    settings: dict[str, Any] = {"rollout_quantization": "int8", **ARMS[arm]}
    if settings.pop(FLOAT32_CODES, False):
        preparation.AUTOCAST.clear()
    found = provenance(torch.device("cpu"), measured="trl_qurl")
    with tempfile.TemporaryDirectory() as directory:
        scheme = settings.pop("rollout_quantization")
        config = build_chat_config(scheme, Path(directory), rollouts, seed, **{"mismatch_guard": "warn", **settings})
        trainer = build_chat_trainer(model, config)
        before = answer_greedily(trainer).accuracy
        trainer.train()
        answers = {"full_precision": answer_greedily(trainer).accuracy, "engine": answer_by_engine(trainer).accuracy}
        rows = read_run(directory).rows
    names = ("objective", "learning_rate", "max_steps", "seed", "quantization_ignore")
    kept: dict[str, Any] = {name: getattr(config, name) for name in names}
    kept |= {"arm": arm, "rollout_quantization": scheme, "before": before, **answers, **found}
    write_short_log(kept, rows, place(output, arm, seed))


def print_table(directory: Path) -> None:
    """One row per arm: means over seeds, of the runs that there are."""
    from trl_qurl.trainers.run_log import read_run

    headings = ("arm", "seeds", "reward, last 10", "accuracy", "by the engine", "KL, first", "last 10", "largest")
    headings += ("largest ρ", "least ESS", "s of a rollout")
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for arm in ARMS:
        runs = [read_run(path) for path in sorted(directory.glob(f"{arm}-seed*.jsonl.gz"))]
        if not runs:
            continue
        logged = [[row for row in run.rows if "mismatch/kl_k3" in row] for run in runs]
        kl = [[row["mismatch/kl_k3"] for row in rows] for rows in logged]
        every = [row for rows in logged for row in rows]
        seconds = [row["time/generate_s"] + row["time/sync_s"] + row["time/logps_s"] for row in every]
        cells = (
            arm,
            str(len(runs)),
            f"{mean(row['reward'] for rows in logged for row in rows[-10:]):.3f}",
            f"{mean(run.settings['full_precision'] for run in runs):.3f}",
            f"{mean(run.settings['engine'] for run in runs):.3f}",
            f"{mean(each[0] for each in kl):.4f}",
            f"{mean(value for each in kl for value in each[-10:]):.4f}",
            f"{max(map(max, kl)):.4f}",
            f"{max(row['mismatch/ratio_max'] for row in every):.1f}",
            f"{min(row['mismatch/ess'] for row in every):.2f}",
            f"{mean(seconds):.1f}",
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
