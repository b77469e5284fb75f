"""What do sampling settings do to the importance ratio, of which the trainer knows nothing?

    python benchmarks/sampling.py

The demo's trainer with a real INT8 engine, at a learning rate of 0, so that all rollouts have the policy that the demo
starts from. Without rounding and kernels, ρ would be the probability of the tokens that sampling keeps.
"""

import argparse
import gc
import os
import sys
import tempfile
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from provenance import provenance, write_record
from rich import box
from rich.console import Console
from rich.table import Table

from trl_qurl.lab.demo.algorithms import build_config, build_trainer
from trl_qurl.lab.demo.run import ENVIRONMENT, prepare_policy

SETTINGS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "top_p=0.95": {"top_p": 0.95},
    "top_p=0.9": {"top_p": 0.9},
    "top_k=5": {"top_k": 5},
    "min_p=0.05": {"min_p": 0.05},
    "repetition_penalty=1.1": {"repetition_penalty": 1.1},
}
METRICS = ("mismatch/ratio_mean", "mismatch/kl_k1", "mismatch/kl_k3")


def measure(policy: Path, settings: dict[str, Any], rollouts: int) -> dict[str, float]:
    """Means over rollouts of 256 completions."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(action="ignore"):
        further = {"learning_rate": 0.0, "logging_steps": 4, "max_steps": 4 * rollouts, "report_to": "none"}
        trainer = build_trainer(
            policy, build_config("grpo", "int8", Path(directory), rollouts, 0, **further, **settings)
        )
        trainer.train()
        rows = [row for row in trainer.state.log_history if METRICS[0] in row]
        del trainer
        gc.collect()
    return {metric: mean(row[metric] for row in rows) for metric in METRICS}


def main() -> int:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    record = {"benchmark": "sampling", **provenance(torch.device("cpu"), "trl_qurl")}
    console = Console()
    policy = prepare_policy()
    record["results"] = {name: measure(policy, settings, args.rollouts) for name, settings in SETTINGS.items()}
    table = Table(title="INT8, the demo's policy before training", box=box.SIMPLE_HEAD)
    for heading in ("sampling", "mean ρ", "kl_k1", "kl_k3"):
        table.add_column(heading)
    for name, found in record["results"].items():
        table.add_row(name, f"{found[METRICS[0]]:.3f}", *(f"{found[metric]:.4f}" for metric in METRICS[1:]))
    console.print(table)
    console.print(f"Written to {write_record(record, args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
