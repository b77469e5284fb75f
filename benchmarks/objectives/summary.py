"""Tables of the comparison, from the logs of its runs.

    python -m benchmarks.objectives.summary
    python -m benchmarks.objectives.summary --runs DIRECTORY --output FILE.json

Every figure is a mean over seeds with half the width of its interval of 95 % (Student's t).
Differences are paired: the two runs of a seed have the same problems in the same order. Those of
BF16 with other seeds are of two samples. Accuracy is the exact expected accuracy of the
full-precision policy on 512 held-out problems, mean of the last 20 rollouts. The policy that
samples is the quantized one, whose accuracy comes from the trainer's own quantized forward pass, or
the same one for rollouts in BF16.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.objectives.arms import EXPERIMENTS, RETIRED
from benchmarks.objectives.study import RESULTS
from trl_qurl.lab.curves import FINAL_ROLLOUTS, final_value, points_of
from trl_qurl.lab.runs import Run, read_run

FIRST = 10  # rollouts
# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
ACCURACY = "expected_accuracy"
QUANTIZED = "quantized_expected_accuracy"
SCHEMES = ("int8", "int4", "int3")
LORA_SCHEMES = ("int8", "w4a16", "int3")
CAPS = (1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
UPDATE_CAPS = (1.05, 1.2, 2.0)
AHEAD = ("naive", "tis", "acr", *RETIRED)

STRANGERS = ("bf16_again",)  # whose seed 0 has nothing in common with that of other arms

Arms = Mapping[str, Mapping[int, Run]]  # by name and seed
Samples = tuple[list[float], list[float]]

CONTRASTS: dict[str, list[tuple[str, str]]] = {
    "main": [
        *((f"{scheme}_{name}", "bf16") for scheme in SCHEMES for name in ("naive", "tis", "acr")),
        *((f"{scheme}_quantized_ratio", f"{scheme}_naive") for scheme in SCHEMES),
        *((f"{scheme}_tis", f"{scheme}_naive") for scheme in SCHEMES),
        *((f"{scheme}_decoupled", f"{scheme}_tis") for scheme in SCHEMES),
        *((f"{scheme}_acr", f"{scheme}_tis") for scheme in SCHEMES),
        *((f"{scheme}_acr_uaq", f"{scheme}_acr") for scheme in SCHEMES),
    ],
    "long": [
        *((f"int3_{name}", "bf16") for name in ("naive", "tis", "decoupled", "acr", "acr_uaq")),
        ("int3_tis", "int3_naive"),
        ("int3_decoupled", "int3_tis"),
        ("int3_acr", "int3_tis"),
        ("int3_acr_uaq", "int3_acr"),
    ],
    "cap": [
        *((f"int3a4_acr_c{cap:g}", f"int3a4_tis_c{cap:g}") for cap in CAPS),
        *((f"int3a4_tis_c{cap:g}", "int3a4_tis_c2") for cap in CAPS if cap != 2.0),
        ("int3a4_tis_c2", "int3a4_naive"),
        ("int3a4_naive", "bf16"),
        ("int3a4_decoupled", "int3a4_tis_c2"),
    ],
    "updates": [(f"int3a4_acr_c{cap:g}", f"int3a4_tis_c{cap:g}") for cap in UPDATE_CAPS],
    "low_rate": [
        *((f"int8_s{scale:g}", "int8_s1") for scale in (1.25, 1.5, 2.0, 3.0)),
        ("int8_rate1.5", "int8_s1.5"),
        ("int8_rate1.5", "int8_s1"),
        ("int8_s1", "bf16_s1"),
    ],
    "lowest_rate": [("int8_s1.5", "int8_s1"), ("int8_s3", "int8_s1")],
    "actors": [
        *((f"{scheme}_tis_smoothed", f"{scheme}_tis") for scheme in ("int8", "int3")),
        *(
            (f"{scheme}_{kind}_tis", f"{scheme}_tis")
            for scheme in ("int8", "int3")
            for kind in ("stochastic", "feedback")
        ),
        *(
            (f"{scheme}_{kind}_tis", "bf16")
            for scheme in ("int8", "int3")
            for kind in ("stochastic", "feedback")
        ),
    ],
    "lora_rate": [],
    "ahead": [
        *((f"bf16_ahead_{name}", "bf16") for name in AHEAD),
        *((f"bf16_ahead_{name}", "bf16_ahead_naive") for name in AHEAD[1:]),
        *((f"bf16_4_ahead_{name}", "bf16_4") for name in AHEAD[:2]),
    ],
    "seeds": [
        *(
            (arm, "bf16")
            for arm in ("bf16_again", "int8_default", "int3_naive", "int3_tis", "int3_acr")
        ),
        *((f"int3_{name}", "int3_naive") for name in ("quantized_ratio", "tis", "acr")),
        ("int3_acr", "int3_tis"),
    ],
    "one_update": [
        *((arm, "bf16") for arm in ("bf16_again", "int8_default", "int3_naive", "int3_tis")),
        ("int3_tis", "int3_naive"),
        ("int8_default", "int8_naive"),
    ],
    "centering": [
        *((f"{scheme}_centered", f"{scheme}_tis") for scheme in ("int3", "int4")),
        *((f"{scheme}_tis_centered", f"{scheme}_tis") for scheme in ("int3", "int4")),
        ("int3_centered_3", "int3_centered"),
    ],
    "in_flight": [
        pair
        for name in ("bf16_16", "int8_16", "bf16_4", "int8_4")
        for pair in ((f"{name}_ahead", name), (f"{name}_in_flight", f"{name}_ahead"))
    ],
    "rloo": [
        *((f"{scheme}_{name}", "bf16") for scheme in ("int8", "int3") for name in ("naive", "tis")),
        *((f"{scheme}_tis", f"{scheme}_naive") for scheme in ("int8", "int3")),
    ],
    "lora": [
        *(
            (f"{scheme}_lora_{way}", "bf16_lora")
            for scheme in LORA_SCHEMES
            for way in ("merged", "adapter", "rounded")
        ),
        *((f"{scheme}_lora_adapter", f"{scheme}_lora_merged") for scheme in LORA_SCHEMES),
        *((f"{scheme}_lora_rounded", f"{scheme}_lora_merged") for scheme in LORA_SCHEMES),
        *((f"{scheme}_lora_rounded", f"{scheme}_lora_adapter") for scheme in LORA_SCHEMES),
    ],
}
"""The pairs of arms to compare, by experiment; some experiments compare nothing."""


def main(argv: list[str] | None = None) -> None:
    """Print the tables; write the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=Path, default=RESULTS, help="directory that study.py wrote to"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args(argv)
    record: dict[str, Any] = {}
    for name, experiment in EXPERIMENTS.items():
        arms = read_arms(args.runs / name, [arm.name for arm in experiment.arms])
        if not arms:
            continue
        rows = {arm: summarize(runs) for arm, runs in arms.items()}
        if experiment.beside:
            others = [arm.name for arm in EXPERIMENTS[experiment.beside].arms]
            arms = {**read_arms(args.runs / experiment.beside, others), **arms}
        pairs = {
            f"{arm} - {other}": difference(arms, arm, other)
            for arm, other in CONTRASTS.get(name, ())
            if arm in arms and other in arms
        }
        print(f"\n### {name}: {experiment.question}\n\n{arm_table(rows)}")
        if pairs:
            print(f"\n{pair_table(pairs)}")
        record[name] = {"question": experiment.question, "arms": rows, "differences": pairs}
    runs = [run for path in sorted(args.runs.glob("*/*.jsonl.gz")) for run in [read_run(path)]]
    record["runs"] = {
        **provenance(runs),
        "count": len(runs),
        "training_hours": sum(map(seconds, runs)) / 3600,
    }
    print(f"\n{json.dumps(record['runs'])}")
    if args.output:
        args.output.write_text(json.dumps(record, indent=2) + "\n")


def read_arms(directory: Path, names: Sequence[str]) -> Arms:
    """The runs that are there, by arm and seed."""
    arms: dict[str, dict[int, Run]] = {}
    for name in names:
        for path in sorted(directory.glob(f"{name}-seed*.jsonl.gz")):
            run = read_run(path)
            arms.setdefault(name, {})[run.settings["seed"]] = run
    return arms


def summarize(runs: Mapping[int, Run]) -> dict[str, Any]:
    """Figures of an arm."""
    every = list(runs.values())
    updates = every[0].settings["updates_per_rollout"]
    return {
        "seeds": sorted(runs),
        "rollouts": max(row["step"] for row in every[0].rows) / updates,
        "accuracy": stated(accuracy(run) for run in every),
        "sampling": stated(sampling_accuracy(run) for run in every),
        "greedy": stated(final_value(points_of(run, "greedy_accuracy")) for run in every),
        "reward": stated(final_value(points_of(run, "reward")) for run in every),
        "kl_first": stated(mean_of_first(run, "mismatch/kl_k3") for run in every),
        "kl_last": stated(final_value(points_of(run, "mismatch/kl_k3")) for run in every),
        "staleness": stated(final_value(points_of(run, "policy/approx_kl")) for run in every),
        "ratio_max": max(value for run in every for _, value in run.series("mismatch/ratio_max")),
        "capped": stated(mean_of(run, "mismatch/capped_share") for run in every),
        "clipped": stated(mean_of(run, "clip_ratio/region_mean") for run in every),
        "let_through": stated(mean_of(run, "acr/let_through_share") for run in every),
    }


def stated(
    values: Iterable[float | None], others: Sequence[float] = ()
) -> list[float | None] | None:
    """Mean, less that of `others`, and half-width, as JSON takes them; `None` where nothing was
    logged.

    The interval is conservative above ten degrees of freedom; a single seed has none.
    """
    logged = [value for value in values if value is not None]
    if len(logged) < 2:
        return [logged[0] - sum(others) / max(len(others), 1), None] if logged else None
    mean, error, freedom = estimate(logged, others)
    return [mean, STUDENT_T[min(freedom, len(STUDENT_T)) - 1] * error]


def estimate(values: Sequence[float], others: Sequence[float] = ()) -> tuple[float, float, int]:
    """Mean of `values`, less that of `others`; its standard error and degrees of freedom, by
    Student's t.

    Two samples are taken to have one spread, as runs that differ in nothing but their seeds do.
    """
    samples = [sample for sample in (values, others) if sample]
    freedom = sum(len(sample) - 1 for sample in samples)
    variance = sum((len(sample) - 1) * statistics.variance(sample) for sample in samples) / freedom
    error = math.sqrt(variance * sum(1 / len(sample) for sample in samples))
    return statistics.mean(values) - (statistics.mean(others) if others else 0.0), error, freedom


def samples_of(
    arms: Arms, ours: str, theirs: str, measure: Callable[..., Any], *args: Any
) -> Samples:
    """The differences of two arms by seed, and nothing; or the values of both, if they have no seed
    in common.
    """
    mine, yours = (
        {
            seed: value
            for seed, run in arms.get(name, {}).items()
            if (value := measure(run, *args)) is not None
        }
        for name in (ours, theirs)
    )
    if ours in STRANGERS:
        return list(mine.values()), list(yours.values())
    return [mine[seed] - yours[seed] for seed in sorted(mine.keys() & yours.keys())], []


def accuracy(run: Run, window: int = FINAL_ROLLOUTS) -> float | None:
    """By which a run is judged."""
    return final_value(points_of(run, ACCURACY), window)


def sampling_accuracy(run: Run, window: int = FINAL_ROLLOUTS) -> float | None:
    """Of the policy that samples; `None` where that is a quantized one that was not measured."""
    unquantized = run.settings.get("rollout_quantization", "?") is None
    return accuracy(run, window) if unquantized else final_value(points_of(run, QUANTIZED), window)


MEASURES = {"accuracy": accuracy, "sampling": sampling_accuracy}
"""The figures to compare."""


def mean_of(run: Run, metric: str) -> float | None:
    """Mean over the whole run."""
    values = points_of(run, metric).values
    return float(values.mean()) if values.size else None


def mean_of_first(run: Run, metric: str) -> float | None:
    """Mean of the first rollouts."""
    values = points_of(run, metric).values[:FIRST]
    return float(values.mean()) if values.size else None


def difference(arms: Arms, ours: str, theirs: str) -> dict[str, Any]:
    """Of each of `MEASURES` at the end of the runs."""
    found: dict[str, Any] = {"seeds": len(arms[ours].keys() & arms[theirs].keys())}
    return found | {
        name: stated(*samples_of(arms, ours, theirs, measure)) for name, measure in MEASURES.items()
    }


def arm_table(rows: Mapping[str, dict[str, Any]]) -> str:
    """One line per arm, in Markdown."""
    headings = (
        "arm",
        "seeds",
        "rollouts",
        "accuracy",
        "sampling policy's",
        "actor's reward",
        "KL, first 10 → last 20 rollouts",
        "staleness",
        "max ρ",
        "ρ > C",
        "clipped",
        "let through by ACR",
    )
    lines = [
        (
            name,
            str(len(row["seeds"])),
            f"{row['rollouts']:.0f}",
            plus_minus(row["accuracy"]),
            plus_minus(row["sampling"]),
            plus_minus(row["reward"]),
            f"{small(row['kl_first'])} → {small(row['kl_last'])}",
            small(row["staleness"]),
            f"{row['ratio_max']:.3g}",
            small(row["capped"]),
            percent(row["clipped"]),
            small(row["let_through"]),
        )
        for name, row in rows.items()
    ]
    return markdown(headings, lines)


def pair_table(pairs: Mapping[str, dict[str, Any]]) -> str:
    """One line per difference, in Markdown; bold if the interval excludes zero."""
    lines = []
    for name, pair in pairs.items():
        lines.append(
            (name, str(pair["seeds"]), *(stated_difference(pair[measure]) for measure in MEASURES))
        )
    return markdown(("difference", "seeds", "accuracy", "sampling policy's"), lines)


def stated_difference(value: Sequence[float | None] | None) -> str:
    """Mean and half-width, in bold if the interval leaves out zero."""
    shown = plus_minus(value, "+.3f")
    mean, half = value or (None, None)
    return f"**{shown}**" if mean is not None and half is not None and abs(mean) > half else shown


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in [headings, ["---"] * len(headings), *lines]
    )


def plus_minus(value: Sequence[float | None] | None, form: str = ".3f") -> str:
    """Mean and half-width."""
    if value is None:
        return "–"
    mean, half = value
    return format(mean, form) if half is None else f"{mean:{form}} ± {half:.3f}"


def small(value: Sequence[float | None] | None) -> str:
    """A mean of any magnitude."""
    return "–" if value is None else f"{value[0]:.2g}"


def percent(value: Sequence[float | None] | None) -> str:
    """A mean share."""
    return "–" if value is None else f"{value[0]:.1%}"


def seconds(run: Run) -> float:
    """Time that a run spent in steps, rollouts included; start-up left out."""
    return sum(value for _, value in run.series("step_time")) * run.settings["updates_per_rollout"]


def provenance(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the date, commit and hardware that the runs recorded."""
    names = ("date", "commit", "hardware")
    return {name: sorted({str(run.settings[name]) for run in runs}) for name in names}


if __name__ == "__main__":
    main()
