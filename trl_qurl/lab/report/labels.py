"""What a group of runs is called in legends and tables: "INT8, acr, UAQ 1.5" rather than names of settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from trl_qurl.lab.report.settings import ABSENT, Settings, identity

OBJECTIVES = ("naive", "quantized_ratio", "decoupled", "tis", "acr")
"""In the paper's order."""

LONGEST_IN_LABEL = 32


def _sixteen_bit(settings: Settings) -> str:
    """The format of rollouts that are not quantized: FP16 where a GPU has no bfloat16."""
    engine = settings.get("vllm_engine_kwargs.dtype", "auto")  # by default what the trainer computes in
    return "FP16" if engine in ("float16", "half") or (engine == "auto" and settings.get("fp16")) else "BF16"


def _scale(value: Any) -> str:
    return "" if value == 1 else f"UAQ {shown(value)}"


def _cap(value: Any) -> str:
    return "no cap" if value is None else f"C {shown(value)}"


def _model(value: Any) -> str:
    return str(value).rstrip("/").split("/")[-1]


WORDED: dict[str, Callable[[Any], str]] = {
    "model": _model,
    "rollout_quantization": lambda value: str(value).upper(),
    "activation_bits": lambda value: f"{shown(value)}-bit activations",
    "algorithm": str,
    "objective": str,
    "vllm_importance_sampling_clip_max": _cap,
    "uaq_scale": _scale,
    "learning_rate": lambda value: f"learning rate {shown(value)}",
}
"""Settings that the method is about, in the order of a label: always part of it where runs differ in them."""

ALWAYS = ("rollout_quantization", "objective", "uaq_scale")
"""What runs are called that differ in nothing."""


def named_settings(different: Sequence[str], runs: Sequence[Settings]) -> list[str]:
    """Which settings a label names: those of `WORDED`, and others as far as they tell apart what is still alike."""
    if not different:
        return [name for name in ALWAYS if name in runs[0]]
    named = [name for name in WORDED if name in different]
    for name in different:
        if name not in named and _kinds(runs, [*named, name]) > _kinds(runs, named):
            named.append(name)
    return named


def wording(name: str, settings: Settings) -> str:
    """One setting as a label has it; empty where there is nothing to say."""
    if name not in settings:
        return f"{name} {ABSENT}"
    value = settings[name]
    if name == "rollout_quantization" and value is None:
        return _sixteen_bit(settings)
    return WORDED[name](value) if name in WORDED else f"{name} {shown(value)}"


def shown(value: Any, longest: int = LONGEST_IN_LABEL) -> str:
    """A setting's value as text: numbers without superfluous digits, anything else cut to so many characters."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int | float):
        return re.sub(r"e([+-])0*(\d)", lambda found: f"e{found[1].lstrip('+')}{found[2]}", f"{value:.6g}")
    text = " ".join(str(value).split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def rank(name: str, settings: Settings) -> tuple[Any, ...]:
    """Sorts groups by one setting: absent and `None` first (BF16 rollouts), objectives as the paper has them."""
    value = settings.get(name)
    if value is None:
        return (0,)
    if name == "objective" and value in OBJECTIVES:
        return (1, OBJECTIVES.index(value))
    if isinstance(value, int | float):
        return (2, value)
    return (3, str(value))


def _kinds(runs: Sequence[Settings], names: Sequence[str]) -> int:
    return len({tuple(identity(run, names)) for run in runs})
