"""docs/results.md: each claim has a verdict, a command and evidence, and its figures are those of
the stored runs.
"""

import json
import re

from documents import ROOT, rows

from benchmarks.objectives.summary import read_arms
from benchmarks.real_model import ARMS, RESULTS
from benchmarks.real_model_tables import arm_table, contrast_table

PAGE, INT8 = ROOT / "docs" / "results.md", ROOT / "benchmarks" / "int8.md"
GEMMA = ["bf16", "bf16_again", "int8_acr", "int8_plain_acr"]
ARITHMETIC = [
    *GEMMA[:3],
    "int8_tis",
    "int8_naive",
    "int8_plain_acr",
    "int8_plain_naive",
    "int8_plain_quantized_ratio",
]
ARITHMETIC += ["int8_merged_adapter", "int8_rounded_base"]
TABLES = [
    ("arithmetic", ARITHMETIC, PAGE, "A real model"),
    ("equations", GEMMA, INT8, "Training a second model"),
]
TABLES += [("facts", ["bf16", "int8_acr", "int8_plain_naive"], INT8, "Long answers")]


def test_every_claim_has_a_verdict_a_command_and_evidence():
    # the paper's claims share their sources
    for claim, verdict, *sources in rows(PAGE, "Verdicts"):
        assert re.search(r"\*\*(seen|not seen|undecided)|not measured", verdict), claim
        assert all(
            re.search(r"`[^`]+`|\]\(|^the same$|^the test$|^none: ", source) for source in sources
        ), claim
        for name in re.findall(
            r"(?:python -m |pytest |python |`(?=benchmarks/))([\w/.-]+)", " ".join(sources)
        ):
            assert (ROOT / (name if "/" in name else f"{name.replace('.', '/')}.py")).exists(), name


def test_figures_are_those_of_the_study_and_the_stored_runs():
    kl, known = {}, (ROOT / "benchmarks" / "study.md").read_text()
    for task, names, page, section in TABLES:
        arms = read_arms(RESULTS / task, ARMS)
        for arm, (_, *shown) in zip(names, rows(page, section), strict=True):
            cells = arm_table({arm: arms[arm]}).splitlines()[-1].strip("| ").split(" | ")
            seeds, *learned, first, last, _, ratio = cells[1:10]
            assert shown == [
                seeds,
                *(learned[i].replace("0.", ".") for i in (0, 2)),
                first,
                last,
                ratio,
            ], arm
            kl.setdefault(task, {})[arm] = f"{float(first):.3f}"
        known += (arm_table(arms) + contrast_table(arms)).replace("-0.", "−0.").replace("0.", ".")
    assert (
        "a KL of {int8_acr} instead of {int8_plain_acr}".format(**kl["arithmetic"])
        in PAGE.read_text()
    )
    for page in {PAGE, INT8}:
        assert [
            each
            for each in re.findall(r"[+−]?\.\d+ ± \.\d+", page.read_text())
            if each not in known
        ] == []


def test_steps_next_to_plain_trl_are_the_stored_ones():
    page, readme = (
        " ".join((ROOT / name).read_text().split()) for name in ("docs/performance.md", "README.md")
    )
    steps, gains = {}, []
    for tokens in (64, 256):
        stored = RESULTS.with_name(
            f"rival-{tokens}-tokens-2026-11-26-amd-epyc-2-cores.json"
        ).read_text()
        for cell in (cells := json.loads(stored)["cells"]):
            steps.setdefault(tokens, []).append(f"{cell['step_s']:.0f}")
            seconds = sorted(step["step_s"] for step in cell["steps"])
            step = (
                f"{cell['step_s']:.1f} ({seconds[0]:.1f}-{seconds[-1]:.1f})"
                if tokens == 64
                else steps[tokens][-1]
            )
            gain, sync = "", ""
            if "sync_s" in cell:
                gains.append(cells[0]["step_s"] / cell["step_s"])
                gain, sync = f"{gains[-1]:.2f} ", f"{cell['sync_s']:.1f} "
            figures = f"| {step} | {cell['generate_s']:.1f} | {sync}| {cell['other_s']:.1f} | "
            assert f"{figures}{cell['peak_bytes'] / 1e9:.1f} GB | {gain}|" in page, figures
    assert f"**seen**: {min(gains):.1f} to {max(gains):.1f} times" in PAGE.read_text()
    assert (
        "takes {} s with plain TRL, {} s with BF16 rollouts and {} s with INT8".format(*steps[64])
        in readme
    )
    assert "256 tokens {}, {} and {} s".format(*steps[256]) in readme
