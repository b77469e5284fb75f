"""In what runs differ: their settings by dotted name, less those that change nothing about training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any]

SEEDS = ("seed", "data_seed")
"""Runs that agree in all but these are repetitions of one experiment."""

NAMES = ("arm",)
"""What a study calls its runs: looked at only where no real setting tells two of them apart."""

ORIGIN = re.compile(r"(date|commit|hardware|versions)(\.|$)")
"""With what a run was made; shown apart, and no difference between runs."""

HIDDEN = re.compile(r"(^|[._])(hub_token|api_key|password|secret)$|\.token$")
"""Never shown: a report is made to be passed on."""

BOOKKEEPING = re.compile(
    r"(output_dir|run_name|project|report_to|disable_tqdm|push_to_hub|resume_from_checkpoint|local_rank|debug)$"
    r"|(log|logging|save|hub|trackio|eval|do)_"
    r"|(num_completions_to_print|skip_memory_metrics|include_num_input_tokens_seen|include_for_metrics)$"
    r"|(weight_metrics_interval|sync_check_interval|sync_probe)$"
    r"|(rollout_checkpoint_dir|vllm_request_timeout|vllm_group_port|ddp_timeout)$|vllm_server_"
    r"|dataloader_(num_workers|pin_memory|persistent_workers|prefetch_factor)$"
)
"""Where a run writes, what it measures, how it reaches its engine: no experiment is about these."""

ABSENT = "not recorded"


def flatten(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name; an empty dictionary stays a value; what is `HIDDEN` is gone."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return {name: value for name, value in flat.items() if not HIDDEN.search(name)}


def differing(settings: Sequence[Settings]) -> list[str]:
    """Names of the settings that make runs different, in the order in which the first run has them."""
    names = [name for name in varying(settings) if not _is_aside(name)]
    for name in NAMES:
        values: dict[tuple[str, ...], set[str]] = {}  # of the name, among runs that nothing else tells apart
        for run in settings:
            if name in run:
                values.setdefault(tuple(identity(run, names)), set()).update(identity(run, [name]))
        if any(len(found) > 1 for found in values.values()):
            names.append(name)
    return names


def varying(settings: Sequence[Settings]) -> list[str]:
    """Names of all settings with more than one value among the runs that recorded them."""
    values: dict[str, set[str]] = {}
    for run in settings:
        for name in run:
            values.setdefault(name, set()).update(identity(run, [name]))
    return [name for name, found in values.items() if len(found) > 1]


def set_aside(settings: Sequence[Settings]) -> list[str]:
    """Names of the settings that vary, but are not counted as a difference; without seeds, names and origin."""
    return [name for name in varying(settings) if BOOKKEEPING.match(name)]


def common(settings: Sequence[Settings]) -> dict[str, Any]:
    """Settings that all runs recorded, with the same value."""
    different = set(varying(settings))
    return {
        name: value
        for name, value in settings[0].items()
        if name not in different and not ORIGIN.match(name) and all(name in run for run in settings)
    }


def origins(settings: Sequence[Settings]) -> dict[str, list[tuple[str, int]]]:
    """With what runs were made: every value of every setting in `ORIGIN`, and how many runs have it."""
    found: dict[str, dict[str, int]] = {}
    for run in settings:
        for name, value in run.items():
            if ORIGIN.match(name):
                counts = found.setdefault(name, {})
                counts[str(value)] = counts.get(str(value), 0) + 1
    return {name: sorted(counts.items()) for name, counts in found.items()}


def identity(run: Settings, names: Iterable[str]) -> list[str]:
    """Values as text that is equal where they are, 1 and 1.0 included."""
    return [_canonical(run[name]) if name in run else ABSENT for name in names]


def _canonical(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return json.dumps(float(value) if number else value, sort_keys=True, default=str)


def _is_aside(name: str) -> bool:
    return name in SEEDS or name in NAMES or bool(ORIGIN.match(name) or BOOKKEEPING.match(name))
