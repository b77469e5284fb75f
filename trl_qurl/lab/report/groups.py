"""Runs that agree in everything but the seed, as one group with a label such as "INT8, acr, UAQ 1.5".

A run with the settings and the seed of another is the same experiment once more. It would make the spread over seeds
look small, so it gets a group of its own and a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_qurl.trainers.run_log import Run, read_run

MOST_PER_PLOT = 8  # groups that can be told apart in one plot, in print too
SEEDS = ("seed", "data_seed")

BOOKKEEPING = re.compile(
    r"(arm|date|commit|hardware|versions)(\.|$)"
    r"|(output_dir|run_name|project|report_to|disable_tqdm|push_to_hub|resume_from_checkpoint|local_rank|debug)$"
    r"|(log|logging|save|hub|trackio|eval|do|weight_metrics|sync_check|sync_probe)(_|$)"
    r"|(num_completions_to_print|skip_memory_metrics|include_num_input_tokens_seen|include_for_metrics)$"
    r"|(rollout_checkpoint_dir|vllm_request_timeout|vllm_group_port|ddp_timeout)$|vllm_server_"
    r"|dataloader_(num_workers|pin_memory|persistent_workers|prefetch_factor)$"
)
"""With what a run was made, where it writes, what it measures, how it reaches its engine: no difference of method."""

WORDED: dict[str, Callable[[Any], str]] = {
    "model": lambda value: str(value).rstrip("/").split("/")[-1],
    "rollout_quantization": lambda value: str(value).upper(),
    "activation_bits": lambda value: f"{shown(value)}-bit activations",
    "algorithm": str,
    "objective": str,
    "vllm_importance_sampling_clip_max": lambda value: "no cap" if value is None else f"C {shown(value)}",
    "uaq_scale": lambda value: "" if value in (None, 1) else f"UAQ {shown(value)}",
    "learning_rate": lambda value: f"learning rate {shown(value)}",
}
"""Settings that the method is about, in the order of a label: part of it wherever runs differ in them."""

ALWAYS = ("rollout_quantization", "objective", "uaq_scale")  # the label of runs that differ in nothing

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone."""

    label: str  # the settings in which it differs from the other groups
    settings: Settings  # of its first run, by dotted name
    runs: tuple[Run, ...]  # one per seed


def load_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read the runs that have rows, each file once, and note what was left out; no run to read is an error."""
    if not paths:
        raise ValueError("No run was given: name the output_dir of at least one run, or its run.jsonl.")
    runs: dict[Path, Run] = {}
    notes = []
    for path in paths:
        run = read_run(path)
        if not run.rows:
            notes.append(f"{path} is left out: it has logged nothing yet.")
        elif run.path.resolve() in runs:
            notes.append(f"{path} was given more than once and is counted once.")
        runs[run.path.resolve()] = run
    logged = [run for run in runs.values() if run.rows]
    if not logged:
        raise ValueError(
            f"None of the runs given ({', '.join(map(str, paths))}) has logged anything. Wait for the first row: it "
            "comes after logging_steps optimizer updates."
        )
    return logged, notes


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    """Put seeds of the same settings together, in the order of their first runs; note repeated seeds."""
    flat = [flatten(run.settings) for run in runs]
    different = differing(flat)
    named = _named_settings(different, flat)
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
        label = ", ".join(filter(None, (wording(name, settings) for name in named))) or "all runs"
        if repetition > 1:
            repeated = f"{label}, repetition {repetition}"
            notes.append(
                f"{label}: there is more than one run with {' and '.join(sorted(seeds)) or 'no seed recorded'}. A "
                f"repetition is not another seed, so it is shown separately, as “{repeated}”."
            )
            label = repeated
        same = sum(group.label == label or group.label.startswith(f"{label} #") for group in groups)
        label = f"{label} #{same + 1}" if same else label  # such as two models of one name
        groups.append(Group(label, settings, tuple(runs[index] for _, index in sorted(seeds.items()))))
    return groups, notes


def parts_of(groups: Sequence[Group]) -> list[list[Group]]:
    """Split groups into plots of at most `MOST_PER_PLOT`; the first group with BF16 rollouts is in each of them."""
    if len(groups) <= MOST_PER_PLOT:
        return [list(groups)]
    baseline = [group for group in groups if group.settings.get("rollout_quantization", "") is None][:1]
    others = [group for group in groups if group not in baseline]
    size = MOST_PER_PLOT - len(baseline)
    return [[*baseline, *others[start : start + size]] for start in range(0, len(others), size)]


def flatten(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name; an empty dictionary stays a value."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return flat


def differing(settings: Sequence[Settings]) -> list[str]:
    """Names of the settings that make runs different, in the order in which the first run has them."""
    names = dict.fromkeys(
        name for run in settings for name in run if name not in SEEDS and not BOOKKEEPING.match(name)
    )
    return [name for name in names if len({_texts(run, [name]) for run in settings if name in run}) > 1]


def wording(name: str, settings: Settings) -> str:
    """One setting as a label has it; empty where there is nothing to say."""
    if name not in settings:
        return f"{name} not recorded"
    value = settings[name]
    if name == "rollout_quantization" and value is None:  # FP16 where a GPU has no bfloat16
        engine = settings.get("vllm_engine_kwargs.dtype", "auto")  # by default what the trainer computes in
        return "FP16" if engine in ("float16", "half") or (engine == "auto" and settings.get("fp16")) else "BF16"
    return WORDED[name](value) if name in WORDED else f"{name} {shown(value)}"


def shown(value: Any, longest: int = 32) -> str:
    """A setting's value as text: numbers without superfluous digits, anything else cut to `longest` characters."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int | float):
        return re.sub(r"e([+-])0*(\d)", lambda found: f"e{found[1].lstrip('+')}{found[2]}", f"{value:.6g}")
    text = " ".join(str(value).split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _named_settings(different: Sequence[str], runs: Sequence[Settings]) -> list[str]:
    """What a label names: settings of `WORDED`, and others as far as they tell apart runs that still look alike."""
    if not different:
        return [name for name in ALWAYS if name in runs[0]]
    named = [name for name in WORDED if name in different]
    for name in different:
        kinds, more = ({_texts(run, names) for run in runs} for names in (named, [*named, name]))
        if len(more) > len(kinds):
            named.append(name)
    return named


def _texts(settings: Settings, names: Sequence[str]) -> tuple[str, ...]:
    """Values as text that is equal where they are, 1 and 1.0 included, but True and 1 not."""

    def text(value: Any) -> str:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return json.dumps(float(value) if number else value, sort_keys=True, default=str)

    return tuple(text(settings[name]) if name in settings else "" for name in names)
