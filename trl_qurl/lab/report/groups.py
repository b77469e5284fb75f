"""Runs that agree in everything but the seed, as one group; and how many groups a plot can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trl_qurl.lab.report.labels import named_settings, rank, shown, wording
from trl_qurl.lab.report.settings import SEEDS, Settings, differing, flatten, identity
from trl_qurl.trainers.run_log import Run

MOST_PER_PLOT = 8
"""Groups that can be told apart in one plot, in print too."""

REPETITION, VARIANT = "repetition", "variant"
"""Parts of a label that no setting stands behind."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone.

    Attributes:
        wordings: what its label is made of, by setting.
        settings: all settings of its first run, by dotted name.
        runs: one per seed.
    """

    wordings: dict[str, str]
    settings: Settings
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """The settings in which it differs from the other groups."""
        return self.label_without(None)

    def label_without(self, name: str | None) -> str:
        """The label, less what it says about one setting; the whole of it if that is all there is."""
        texts = [text for setting, text in self.wordings.items() if text and setting != name]
        return ", ".join(texts or filter(None, self.wordings.values())) or "all runs"


@dataclass(frozen=True)
class Entry:
    """A group as one plot shows it; `style` is the number of its colour, dashes and marker."""

    group: Group
    label: str
    style: int


@dataclass(frozen=True)
class Facet:
    """What goes into one plot: all groups, or those that share the setting which `title` tells."""

    title: str
    entries: tuple[Entry, ...]


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    """Groups in the order of their labels' settings, and notes on runs that could be mistaken for seeds.

    A second run with the settings and the seed of another is no further seed: it is the same experiment once more,
    and would make the spread over seeds look small. It goes into a group of its own.
    """
    flat = {id(run): flatten(run.settings) for run in runs}
    different = differing(list(flat.values()))
    named = named_settings(different, list(flat.values()))
    members: dict[tuple[tuple[str, ...], int], dict[str, Run]] = {}  # by settings and repetition, then by seed
    for run in runs:
        key = tuple(identity(flat[id(run)], different))
        seed = _seed_text(flat[id(run)])
        repetition = 1
        while seed in members.setdefault((key, repetition), {}):
            repetition += 1
        members[key, repetition][seed] = run
    groups, notes = [], []
    for (_, repetition), by_seed in members.items():
        settings = flat[id(next(iter(by_seed.values())))]
        wordings = {name: wording(name, settings) for name in named}
        if repetition > 1:
            wordings[REPETITION] = f"{REPETITION} {repetition}"
            notes.append(_repetition_note(Group(wordings, settings, ()), list(by_seed)))
        groups.append(Group(wordings, settings, tuple(run for _, run in sorted(by_seed.items()))))
    groups.sort(key=lambda group: (*(rank(name, group.settings) for name in named), len(group.wordings), group.label))
    return _with_distinct_labels(groups), notes


def make_facets(groups: Sequence[Group]) -> list[Facet]:
    """One facet if all groups fit into a plot; else one per value of a setting, or eight groups at a time.

    The only group with BF16 rollouts is in every facet: it is what the others are measured against.
    """
    if len(groups) <= MOST_PER_PLOT:
        return [Facet("", tuple(Entry(group, group.label, style) for style, group in enumerate(groups)))]
    baselines = [group for group in groups if _has_bf16_rollouts(group)]
    baseline = [Entry(group, group.label, 0) for group in baselines] if len(baselines) == 1 else []
    others = [group for group in groups if not baseline or not _has_bf16_rollouts(group)]
    name = _splitting_setting(others)
    # The same label has the same style in every facet; style 0 is the baseline's.
    labels = list(dict.fromkeys(group.label_without(name) for group in others))
    entries = [Entry(group, label := group.label_without(name), labels.index(label) + 1) for group in others]
    parts: dict[str, list[Entry]] = {}
    for position, entry in enumerate(entries):
        title = _facet_title(entry.group, name) if name else f"part {position // MOST_PER_PLOT + 1}"
        parts.setdefault(title, []).append(entry)
    return [Facet(title, (*baseline, *part)) for title, part in parts.items()]


def _facet_title(group: Group, name: str) -> str:
    return group.wordings[name] or f"{name} {shown(group.settings[name])}"


def _splitting_setting(groups: Sequence[Group]) -> str | None:
    """The setting that splits the groups into the fewest plots, none too full, and not one for every other group."""
    fitting: dict[str, int] = {}
    for name in groups[0].wordings:
        texts = [group.wordings.get(name) for group in groups]
        counts = {text: texts.count(text) for text in texts}
        if 1 < len(counts) <= len(groups) / 2 and max(counts.values()) <= MOST_PER_PLOT and None not in counts:
            fitting[name] = len(counts)
    return min(fitting, key=lambda name: fitting[name], default=None)


def _has_bf16_rollouts(group: Group) -> bool:
    name = "rollout_quantization"
    return name in group.wordings and group.settings.get(name, "") is None


def _with_distinct_labels(groups: Sequence[Group]) -> list[Group]:
    """Number those whose settings differ, but not in words (two models of one name)."""
    met: dict[str, int] = {}
    distinct = []
    for group in groups:
        number = met[group.label] = met.get(group.label, 0) + 1
        wordings = group.wordings if number == 1 else {**group.wordings, VARIANT: f"{VARIANT} {number}"}
        distinct.append(Group(wordings, group.settings, group.runs))
    return distinct


def _repetition_note(group: Group, seeds: Sequence[str]) -> str:
    return (
        f"{group.label_without(REPETITION)}: there is more than one run with {' and '.join(sorted(seeds))}. A "
        f"repetition is no further seed, so it is shown apart, as “{group.label}”."
    )


def _seed_text(settings: Settings) -> str:
    seeds = [f"{name} {settings[name]}" for name in SEEDS if settings.get(name) is not None]
    return ", ".join(seeds) or "no seed recorded"
