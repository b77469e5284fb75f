"""Tables and a picture of the runs of `real_model.py`.

python -m benchmarks.real_model_tables                  # arms, and contrasts with Holm's correction
python -m benchmarks.real_model_tables --picture docs/images/real-model.png
"""

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean as mean
from statistics import median
from typing import Any

import numpy as np

from benchmarks.chat_tasks import TASKS
from benchmarks.objectives.contrasts import holm, p_value
from benchmarks.objectives.summary import (
    STRANGERS,
    Arms,
    markdown,
    plus_minus,
    read_arms,
    samples_of,
    stated,
    stated_difference,
)
from benchmarks.real_model import ARMS, RESULTS, UPDATES, runs_of
from trl_qurl.lab.curves import Panel, Points, draw
from trl_qurl.lab.mismatch.table import HARMLESS
from trl_qurl.lab.runs import Run

CONTRASTS = [
    ("bf16_again", "bf16"),  # what seeds alone do
    *(
        (arm, "bf16")
        for arm in ("int8_acr", "int8_tis", "int8_naive", "int8_plain_acr", "int8_plain_naive")
    ),
    ("int8_acr", "int8_tis"),
    ("int8_tis", "int8_naive"),
    ("int8_acr", "int8_plain_acr"),
    ("int8_naive", "int8_plain_naive"),
    ("int8_plain_acr", "int8_plain_naive"),
    ("int8_plain_quantized_ratio", "int8_plain_naive"),
    ("int8_triple_rate", "bf16_triple_rate"),
]
SHOWN = {
    "bf16": "16 bits",
    "int8_acr": "INT8, the default",
    "int8_plain_quantized_ratio": "INT8, not smoothed, the wrong ratio (quantized_ratio)",
    "bf16_again": "16 bits, other seeds",
    "int8_plain_naive": "INT8, neither smoothed nor corrected",
}
MEASURES: dict[str, Any] = {
    "reward, first 20": lambda run: mean(row["reward"] for row in rollouts(run)[:20]),
    "last ten": lambda run: mean(row["reward"] for row in rollouts(run)[-10:]),
    "accuracy": lambda run: run.settings["engine"],  # of the policy that is served
    "full precision": lambda run: run.settings["full_precision"],
}


def main() -> None:
    """Print the tables, or draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="arithmetic", help="default: arithmetic")
    parser.add_argument(
        "--updates", type=int, choices=(1, UPDATES), default=UPDATES, help="per rollout"
    )
    parser.add_argument(
        "--runs", type=Path, default=RESULTS, help="directory that real_model.py wrote to"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw instead")
    args = parser.parse_args()
    arms = read_arms(args.runs / runs_of(args.task, args.updates), list(ARMS))
    if args.picture:
        draw_arms(arms, args.picture)
    else:
        print(arm_table(arms), contrast_table(arms), sep="\n\n")


def arm_table(arms: Arms) -> str:
    """Format one row per arm: means over seeds, with half a 95 % interval (Student's t) for reward
    and accuracy.
    """
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
                *(
                    plus_minus(stated(measure(run) for run in runs))
                    for measure in MEASURES.values()
                ),
                f"{mean(each[0] for each in kl):.4f}",
                f"{mean(value for each in kl for value in each[-10:]):.4f}",
                f"{max(map(max, kl)):.4f}",
                f"{max(row['mismatch/ratio_max'] for row in every):.1f}",
                f"{max(row['mismatch/capped_share'] for row in every):.2%}",
                f"{min(row['mismatch/ess'] for row in every):.2f}",
                f"{median_seconds(runs):.1f}",
            )
        )
    return markdown((*headings, "largest ρ", "ρ > C at most", "least ESS", "s of a rollout"), lines)


def rollouts(run: Run) -> list[dict[str, Any]]:
    """Return the rows that describe a rollout."""
    return [row for row in run.rows if "mismatch/kl_k3" in row]


def median_seconds(runs: Iterable[Run]) -> float:
    """Return the median time of a rollout: generation, sync, scoring and updates."""
    return median(
        row["time/generate_s"]
        + row["time/sync_s"]
        + row["time/logps_s"]
        + run.settings.get("steps_per_generation", UPDATES) * row["time/update_s"]
        for run in runs
        for row in rollouts(run)
    )


def contrast_table(arms: Arms) -> str:
    """Format differences, in brackets the p-value, and Holm's over all that are in the same column.

    Where no arm has other seeds, the spread of BF16's own says what seeds alone do to a mean.
    """
    columns: dict[str, list[str]] = {}
    for measure, function in MEASURES.items():
        found = {
            f"{ours} − {theirs}": samples_of(arms, ours, theirs, function)
            for ours, theirs in CONTRASTS
        }
        found = {name: each for name, each in found.items() if each[0]}
        p_values = [p_value(*each) for each in found.values()]
        columns["difference"] = list(found)
        columns["seeds"] = [str(len(values)) for values, _ in found.values()]
        columns[measure] = [
            f"{stated_difference(stated(*each))} ({p:.3f}, {corrected:.3f})"
            for each, p, corrected in zip(found.values(), p_values, holm(p_values), strict=True)
        ]
        if arms.keys() & {"bf16", *STRANGERS} == {"bf16"} and len(arms["bf16"]) > 1:
            columns["difference"].append("other seeds of bf16")
            columns["seeds"].append(str(len(arms["bf16"])))
            _, half = stated(map(function, arms["bf16"].values())) or (None, None)
            columns[measure].append(f"± {math.sqrt(2) * (half or 0.0):.3f}")
    return markdown(list(columns), list(zip(*columns.values(), strict=True)))


def draw_arms(arms: Arms, path: Path) -> None:
    """Draw reward and KL by rollout, a line per arm: the mean of its seeds."""
    shown = {label: arms[arm].values() for arm, label in SHOWN.items() if arm in arms}
    rewards = {label: [curve(run, "reward") for run in runs] for label, runs in shown.items()}
    kl = {label: [curve(run, "mismatch/kl_k3") for run in runs] for label, runs in shown.items()}
    panels = [
        Panel("Reward", "share of right answers", rewards),
        Panel("KL(engine ‖ policy)", "nats per token", kl, logarithmic=True, limit=HARMLESS),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(panels, path)
    print(path)


def curve(run: Run, metric: str) -> Points:
    """Return a metric by rollout. These short logs have no setting to count rollouts by."""
    values = np.array([row[metric] for row in rollouts(run)])
    return Points(np.arange(1.0, len(values) + 1), values)


if __name__ == "__main__":
    main()
