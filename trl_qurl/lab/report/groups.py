"""Group runs that differ only in their seed, with labels such as "INT8, acr, UAQ 1.5".

A run with the same settings and seed as another repeats the experiment. It would make the spread over seeds look too
small, so it gets a separate group and a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_qurl.trainers.run_log import Run, read_run

MOST_PER_PLOT = 8  # groups that readers can tell apart in one plot, even in print
SEEDS = ("seed", "data_seed")

BOOKKEEPING = re.compile(
    r"(arm|date|commit|hardware|versions)(\.|$)"
    r"|(output_dir|run_name|project|report_to|disable_tqdm|push_to_hub|resume_from_checkpoint|local_rank|debug)$"
    r"|(log|logging|save|hub|trackio|eval|do|weight_metrics|sync_check|sync_probe)(_|$)"
    r"|(num_completions_to_print|skip_memory_metrics|include_num_input_tokens_seen|include_for_metrics)$"
    r"|(rollout_checkpoint_dir|vllm_request_timeout|vllm_group_port|ddp_timeout)$|vllm_server_"
    r"|dataloader_(num_workers|pin_memory|persistent_workers|prefetch_factor)$"
)
"""Settings of environment, output, measurements and engine connection, which do not change the method."""

WORDED: dict[str, Callable[[Any], str]] = {
    "model": lambda value: str(value).rstrip("/").split("/")[-1],
    "rollout_quantization": lambda value: str(value).upper(),
    "activation_bits": lambda value: f"{as_text(value)}-bit activations",
    "algorithm": str,
    "objective": str,
    "vllm_importance_sampling_clip_max": lambda value: "no cap" if value is None else f"C {as_text(value)}",
    "uaq_scale": lambda value: "" if value in (None, 1) else f"UAQ {as_text(value)}",
    "learning_rate": lambda value: f"learning rate {as_text(value)}",
}
"""Settings of the method and their wording, in label order; a label includes those in which runs differ."""

ALWAYS = ("rollout_quantization", "objective", "uaq_scale")  # label of runs with identical settings

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str  # the settings that distinguish it from the other groups
    settings: Settings  # settings of its first run, by dotted name
    runs: tuple[Run, ...]  # one per seed


def load_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read the runs that have rows, each file once, and note omissions; raise `ValueError` if there are none."""
    if not paths:
        raise ValueError("No runs to read: give the output_dir or the run.jsonl of at least one run.")
    runs: dict[Path, Run] = {}
    notes = []
    for path in paths:
        run = read_run(path)
        if not run.rows:
            notes.append(f"{path} is left out: it has not logged anything yet.")
        elif run.path.resolve() in runs:
            notes.append(f"{path} was given more than once, but counts once.")
        runs[run.path.resolve()] = run
    logged = [run for run in runs.values() if run.rows]
    if not logged:
        raise ValueError(
            f"None of the runs ({', '.join(map(str, paths))}) has logged anything yet. The first row appears after "
            "logging_steps optimizer updates."
        )
    return logged, notes


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    """Group seeds of the same settings, in the order of their first runs, and note repeated seeds."""
    flat = [flatten(run.settings) for run in runs]
    different = differing(flat)
    label_names = _label_settings(different, flat)
    members: dict[tuple[tuple[str, ...], int], dict[str, int]] = {}  # by settings and repetition; seed to run
    for index, settings in enumerate(flat):
        seed = ", ".join(f"{name} {settings[name]}" for name in SEEDS if settings.get(name) is not None)
        values, repetition = _texts(settings, different), 1
        while seed in members.setdefault((values, repetition), {}):
            repetition += 1
        members[values, repetition][seed] = index
    groups: list[Group] = []
    notes = []
    for (_, repetition), seeds in members.items():
        settings = flat[min(seeds.values())]
        label = ", ".join(filter(None, (wording(name, settings) for name in label_names))) or "all runs"
        if repetition > 1:
            new_label = f"{label}, repetition {repetition}"
            notes.append(
                f"{label}: several runs have {' and '.join(sorted(seeds)) or 'no recorded seed'}. A repetition is not "
                f"another seed, so it is shown separately, as “{new_label}”."
            )
            label = new_label
        same = sum(group.label == label or group.label.startswith(f"{label} #") for group in groups)
        label = f"{label} #{same + 1}" if same else label  # for example, two models with the same name
        groups.append(Group(label, settings, tuple(runs[index] for _, index in sorted(seeds.items()))))
    return groups, notes


def parts_of(groups: Sequence[Group]) -> list[list[Group]]:
    """Split groups into plots of at most `MOST_PER_PLOT`, each with the first group with BF16 rollouts."""
    if len(groups) <= MOST_PER_PLOT:
        return [list(groups)]
    baseline = [group for group in groups if group.settings.get("rollout_quantization", "") is None][:1]
    others = [group for group in groups if group not in baseline]
    size = MOST_PER_PLOT - len(baseline)
    return [[*baseline, *others[start : start + size]] for start in range(0, len(others), size)]


def flatten(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names; an empty dictionary stays a value."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return flat


def differing(settings: Sequence[Settings]) -> list[str]:
    """Return the names of the settings in which runs differ, in the order of the first run."""
    names = dict.fromkeys(
        name for run in settings for name in run if name not in SEEDS and not BOOKKEEPING.match(name)
    )
    return [name for name in names if len({_texts(run, [name]) for run in settings if name in run}) > 1]


def wording(name: str, settings: Settings) -> str:
    """Format one setting for a label; may be empty."""
    if name not in settings:
        return f"{name} not recorded"
    value = settings[name]
    if name == "rollout_quantization" and value is None:  # FP16 if the GPU does not support bfloat16
        engine = settings.get("vllm_engine_kwargs.dtype", "auto")  # defaults to the trainer's dtype
        return "FP16" if engine in ("float16", "half") or (engine == "auto" and settings.get("fp16")) else "BF16"
    return WORDED[name](value) if name in WORDED else f"{name} {as_text(value)}"


def as_text(value: Any, longest: int = 32) -> str:
    """Format a setting's value: numbers without superfluous digits, anything else cut to `longest` characters."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int | float):
        return re.sub(r"e([+-])0*(\d)", lambda match: f"e{match[1].lstrip('+')}{match[2]}", f"{value:.6g}")
    text = " ".join(str(value).split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _label_settings(different: Sequence[str], runs: Sequence[Settings]) -> list[str]:
    """Choose the settings for labels: those of `WORDED`, plus others that still distinguish runs."""
    if not different:
        return [name for name in ALWAYS if name in runs[0]]
    selected = [name for name in WORDED if name in different]
    for name in different:
        kinds, more = ({_texts(run, names) for run in runs} for names in (selected, [*selected, name]))
        if len(more) > len(kinds):
            selected.append(name)
    return selected


def _texts(settings: Settings, names: Sequence[str]) -> tuple[str, ...]:
    """Serialize values so that equal ones give equal text: 1 equals 1.0, but not True."""

    def text(value: Any) -> str:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return json.dumps(float(value) if number else value, sort_keys=True, default=str)

    return tuple(text(settings[name]) if name in settings else "" for name in names)
