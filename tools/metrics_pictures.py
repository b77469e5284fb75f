"""Draw the pictures of docs/metrics.md and benchmarks/study.md: python tools/metrics_pictures.py

Both show runs whose logs are in the repository. The first has one healthy run and two sick ones,
whose final figures are printed in the form of the page's table.
"""

from pathlib import Path

from trl_qurl.lab.curves import Panel, draw, final_value, points_of
from trl_qurl.lab.report import LIMITS
from trl_qurl.lab.runs import Run, read_run

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks" / "objectives" / "runs"
IMAGES = ROOT / "docs" / "images"

SHOWN = {
    "INT8, acr: healthy": "int8_acr-seed2",
    "INT3, naive: sick behind a good reward": "int3_naive-seed2",
    "INT3, quantized_ratio: collapses": "int3_quantized_ratio-seed2",
}
METRICS = {
    "reward": ".2f",
    "expected_accuracy": ".2f",
    "mismatch/kl_k3": ".2g",
    "mismatch/ratio_max": ".1f",
    "policy/approx_kl": ".2g",
    "clip_ratio/region_mean": ".2g",
}
LONG = {
    "16 bits": "bf16",
    "INT3, without a correction": "int3_naive",
    "INT3, truncated importance sampling (TIS)": "int3_tis",
    "INT3, adaptive clipping range (ACR)": "int3_acr",
}


def read(file: str) -> Run:
    """Read the short log of a run."""
    return read_run(RUNS / f"{file}.jsonl.gz")


def draw_metrics() -> None:
    """Print the figures of the page's table, and draw a panel per metric."""
    runs = {label: read(f"main/{file}") for label, file in SHOWN.items()}
    panels = []
    for metric, printed in METRICS.items():
        points = {label: points_of(run, metric) for label, run in runs.items()}
        print(metric, *(format(final_value(each), printed) for each in points.values()), sep=" | ")
        lines = {label: [each] for label, each in points.items()}
        spread = metric.startswith(("mismatch/", "policy/"))  # over orders of magnitude
        limit = LIMITS.get(metric)
        panels.append(Panel(metric, "mean of five rollouts", lines, spread, limit=limit))
    draw(panels, IMAGES / "metrics-healthy-and-sick.png")


def draw_long_runs() -> None:
    """Draw the accuracy of the runs with 450 rollouts, the mean of three seeds."""
    lines = {
        label: [
            points_of(read(f"long/{name}-seed{seed}"), "expected_accuracy") for seed in range(3)
        ]
        for label, name in LONG.items()
    }
    panel = Panel("Accuracy on held-out sums: three seeds each", "share of right samples", lines)
    draw([panel], IMAGES / "objectives-long-accuracy.png")


if __name__ == "__main__":
    draw_metrics()
    draw_long_runs()
