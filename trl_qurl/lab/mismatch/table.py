"""A readable mismatch report: the tables, and one sentence of advice per format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_qurl.lab.comparison import BASELINE, label, new_table
from trl_qurl.lab.mismatch.run import Report
from trl_qurl.lab.mismatch.statistics import CAP, Mismatch

if TYPE_CHECKING:
    from rich.table import Table

    from trl_qurl.lab.mismatch.keep import Kept

HARMLESS = 0.005
"""KL (k3) per token below which our study and the paper saw no harm; INT4 had .01 there, also without harm."""

RISKY = 0.02
"""KL (k3) per token with which runs ended badly: .025 before the paper's collapse, .05 for INT3 and plain INT8."""


def build_table(report: Report) -> Table:
    """Build a table of the statistics by format, within 80 columns."""
    first = next(iter(report.formats.values()))
    title = f"{report.model}: {first.answers} answers of {first.tokens / first.answers:.0f} tokens"
    caption = (
        f"KL in 1e-3 nats per token (k3) with 95 % intervals; ρ: policy over engine; C = {CAP:g}; kernels: share of "
        "the KL that a 16-bit engine has, too; ESS: effective sample size of tokens; half: answer length at which the "
        "ESS of sequence weights is 1/2; same top: tokens with the same most likely token."
    )
    figures = ("KL", "kernels", "ρ 0.1-99.9 %", "ρ > C", "ESS", "half", "same top")
    table = new_table(title, caption, ["format"], figures)
    for name, mismatch in report.formats.items():
        low, *_, high = mismatch.ratio_quantiles.values()
        table.add_row(
            label(name),
            f"{thousandths(mismatch.kl_k3.value)} ± {thousandths((mismatch.kl_k3.high - mismatch.kl_k3.low) / 2)}",
            share_of_kernels(mismatch, report),
            f"{low:.2f}-{high:.2f}",
            f"{mismatch.capped_share:.2%}",
            f"{mismatch.ess:.1%}",
            "-" if mismatch.half_length is None else tokens(mismatch.half_length),
            f"{mismatch.agreement:.1%}",
        )
    return table


def build_layer_table(kept: Kept, most: int = 12) -> Table:
    """Build a table of the layers with the most KL per byte, within 80 columns."""
    title = f"Sources of the KL: the first {min(most, len(kept.groups))} of {len(kept.groups)} groups of layers"
    caption = (
        "Estimated KL from each group, in 1e-3 nats per token; most KL per byte first. Layers kept in 16 bits add "
        f"{kept.extra_bytes / 1e6:.3g} MB, {kept.share:.1%} of what quantization saves."
    )
    table = new_table(title, caption, ["layers"], ("KL", "MB", "16 bits"))
    for group in kept.groups[:most]:
        first, *others = group.layers
        parent = first.rpartition(".")[0]
        table.add_row(
            ", ".join([first, *(other.removeprefix(f"{parent}.") for other in others[:2])])
            + ", ..." * (len(others) > 2),
            thousandths(group.kl),
            f"{group.extra_bytes / 1e6:.3g}",
            "yes" if first in kept.ignore else "",
        )
    return table


def sentences(report: Report) -> list[str]:
    """Return the advice for each format, with its reason."""
    lines = [f"{label(name)}: {verdict(mismatch)}" for name, mismatch in report.formats.items() if name != BASELINE]
    if (kept := report.kept) and (kl := report.formats[kept.name].kl_k3.value) > kept.limit:
        lines.append(f"{label(kept.name)} has a KL of {kl:.2g}, above --kl {kept.limit:g}: lower --kl to keep more.")
    lines += [f"{label(name)}: not measured. {failure}" for name, failure in report.failures.items()]
    if any(name != BASELINE for name in report.formats):
        lines.append(
            "These results are for the current weights. Training can increase the mismatch: watch mismatch/kl_k3, and "
            "if it grows, lower the learning rate or add sensitive layers to quantization_ignore."
        )
    return lines


def verdict(mismatch: Mismatch) -> str:
    """Rate a format as safe, safe with a correction, or risky (docs/mismatch.md)."""
    whole = ""
    if mismatch.half_length is not None:
        reach = tokens(mismatch.half_length)
        whole = f" Sequence weights (RLOO, GSPO) keep half their effective sample size up to {reach} tokens."
    kl = f"a KL of {mismatch.kl_k3.value:.2g}"
    if mismatch.kl_k3.high < HARMLESS:
        return f"safe to train with: {kl} did no harm in our study. Keep the defaults.{whole}"
    if mismatch.kl_k3.low >= RISKY:
        return (
            f"risky: with {kl} some runs of our study ended badly, even with a correction. Choose a finer format, "
            f"keep sensitive layers in 16 bits (quantization_ignore), or leave smooth_activations on (INT8).{whole}"
        )
    return f"needs a correction: at {kl} keep objective='acr' or 'tis', and watch mismatch/kl_k3.{whole}"


def share_of_kernels(mismatch: Mismatch, report: Report) -> str:
    """Format the share of a format's KL that a 16-bit engine has, too."""
    if report.by_kernels is None or mismatch is report.formats.get(BASELINE):
        return "-"
    return f"{min(1.0, report.by_kernels / mismatch.kl_k3.value):.0%}" if mismatch.kl_k3.value > 0 else "-"


def thousandths(nats: float) -> str:
    """Format nats in thousandths, with two digits."""
    value = 1e3 * nats
    if abs(value) < 1e-4:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def tokens(count: float) -> str:
    """Format a number of tokens to two digits."""
    if count >= 1e6:
        return "> 1M"
    rounded = float(f"{count:.2g}")
    return f"{rounded / 1e3:g}k" if rounded >= 1e3 else f"{rounded:g}"
