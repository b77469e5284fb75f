"""A readable mismatch report: the tables, and one sentence of advice per format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trl_qurl.lab.comparison import BASELINE, label, new_table
from trl_qurl.lab.mismatch.report import Choice, Report
from trl_qurl.lab.mismatch.statistics import CAP, Mismatch

if TYPE_CHECKING:
    from rich.table import Table

HARMLESS = 0.005
"""KL (k3) per token below which our study and the paper saw no harm.

INT4 had .01 there, also without harm.
"""

RISKY = 0.02
"""KL (k3) per token with which single runs ended low.

It was .025 before the paper's collapse, and .05 for INT3 and plain INT8.
"""


def build_table(report: Report) -> Table:
    """Build a table of the statistics by format, within 80 columns."""
    first = next(iter(report.formats.values()))
    title = f"{report.model}: {first.answers} answers of {first.tokens / first.answers:.0f} tokens"
    caption = (
        "KL in 1e-3 nats per token (k3; exact if simulated) with 95 % intervals; ρ: policy over "
        f"engine; C = {CAP:g}; kernels: share of the KL that a 16-bit engine has, too; ESS: "
        "effective sample size of tokens."
    )
    table = new_table(title, caption, ["format"], ("KL", "kernels", "ρ 0.1-99.9 %", "ρ > C", "ESS"))
    caches = {f"cache {name}": mismatch for name, mismatch in report.caches.items()}
    for name, mismatch in {**report.formats, **caches}.items():
        low, *_, high = mismatch.ratio_quantiles.values()
        kl = mismatch.kl_k3
        share = "-"
        if name not in (BASELINE, *caches) and kl.value > 0:
            share = f"{min(1.0, report.by_kernels / kl.value):.0%}"
        table.add_row(
            name if name in caches else label(name),
            f"{thousandths(kl.value)} ± {thousandths((kl.high - kl.low) / 2)}",
            share,
            f"{low:.2f}-{high:.2f}",
            f"{mismatch.capped_share:.2%}",
            f"{mismatch.ess:.1%}",
        )
    return table


def build_layer_table(choice: Choice, most: int = 12) -> Table:
    """Build a table of the layers with the most KL per byte, within 80 columns."""
    most_extra = sum(step.extra_bytes for step in choice.steps)
    extra = sum(step.extra_bytes for step in choice.steps[: choice.taken])
    caption = (
        "Estimated KL that a finer format removes, in 1e-3 nats per token; most KL per byte first. "
        f"Those taken add {extra / 1e6:.3g} MB, {extra / most_extra:.1%} of what quantization "
        "saves."
    )
    title = f"Sources of the KL: the first {min(most, len(choice.steps))} of {len(choice.steps)}"
    table = new_table(title, caption, ["layers"], ("finer", "KL", "MB", "taken"))
    for number, step in enumerate(choice.steps[:most]):
        names = step.layers[0]
        if len(step.layers) > 1:
            names += f" and {len(step.layers) - 1} fused"
        table.add_row(
            names,
            label(step.format),
            thousandths(step.kl),
            f"{step.extra_bytes / 1e6:.3g}",
            "yes" if number < choice.taken else "",
        )
    return table


def sentences(report: Report) -> list[str]:
    """Return the advice for each format, with its reason."""
    lines = [
        f"{label(name)}: {verdict(mismatch)}"
        for name, mismatch in report.formats.items()
        if name != BASELINE
    ]
    lines += [cache_verdict(report, cache) for cache in report.caches]
    if report.caches:
        lines.append(
            f"The prompts have {report.settings['prompt_tokens']:.0f} tokens on average. Errors of "
            "a cache grow with the context: ask with prompts as long as your answers become."
        )
    choice = report.choice
    if choice is not None:
        kl = report.formats[choice.name].kl_k3.value
        if kl > choice.limit:
            lines.append(
                f"{label(choice.name)} has a KL of {kl:.2g}, above --kl {choice.limit:g}: lower "
                "--kl."
            )
    lines.append(
        "These results are for the current weights. Training can increase the mismatch: watch "
        "mismatch/kl_k3, and if it grows, lower the learning rate or choose finer formats for "
        "sensitive layers."
    )
    return lines


def verdict(mismatch: Mismatch) -> str:
    """Rate a format as safe, fine with the correction, or risky (docs/mismatch.md)."""
    kl = f"a KL of {mismatch.kl_k3.value:.2g}"
    if mismatch.kl_k3.high < HARMLESS:
        return f"safe to train with: {kl} did no harm in our study. Keep the defaults."
    if mismatch.kl_k3.low >= RISKY:
        return (
            f"risky: with {kl} single runs of our study ended low, even with a correction. Choose "
            "a finer format, keep sensitive layers in 16 bits (quantization_ignore), or leave "
            "smooth_activations on (INT8)."
        )
    return (
        f"keep the correction (objective='acr' or 'tis'): {kl} is no reason to change the format. "
        "Watch mismatch/kl_k3."
    )


def cache_verdict(report: Report, cache: str) -> str:
    """Recommend a cache if its KL is below that of the weights (docs/mismatch.md).

    The 95 % interval of their difference comes from both of theirs, as in G. Zou and A. Donner,
    "Construction of confidence limits about effect measures" (2008). It takes the two as
    independent; a single answer has no interval, and decides nothing.
    """
    weights = {
        name: mismatch.kl_k3 for name, mismatch in report.formats.items() if name != BASELINE
    }
    finest = min(weights, key=lambda name: weights[name].value)
    theirs = weights[finest]
    ours = report.caches[cache].kl_k3
    kl = f"Cache {cache}: its KL of {ours.value:.2g} is"
    figures = f"that of {label(finest)} weights, {theirs.value:.2g}"
    excess = ours.value - theirs.value
    margin_above = math.hypot(ours.value - ours.low, theirs.high - theirs.value)
    margin_below = math.hypot(ours.high - ours.value, theirs.value - theirs.low)
    if excess > margin_above > 0:
        return f"{kl} above {figures}: leave kv_cache_dtype out."
    if -excess > margin_below > 0:
        return f"{kl} below {figures}: fine beside them."
    return (
        f"{kl} not clearly above or below {figures}: leave kv_cache_dtype out, or measure with "
        "more prompts."
    )


def thousandths(nats: float) -> str:
    """Format nats in thousandths, with two digits, and without an exponent if they are many."""
    rounded = float(f"{1e3 * nats:.2g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"
