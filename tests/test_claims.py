"""docs/results.md: each claim has a verdict, a command and evidence, and its figures are those of the stored runs."""

import re

import pytest
from documents import ROOT, rows

from benchmarks.objectives.summary import read_arms
from benchmarks.real_model import ARMS, RESULTS
from benchmarks.real_model_tables import arm_table, contrast_table

PAGE = ROOT / "docs" / "results.md"
ROW_OF_ARM = ["bf16", "int8_naive", "int8_tis", "int8_acr", "int8_plain_naive", "int8_plain_tis", "int8_plain_acr"]
ROW_OF_ARM += ["int8_plain_decoupled", "int8_plain_quantized_ratio", "int8_merged_adapter", "int8_rounded_base"]


@pytest.fixture(scope="module")
def arms():
    return read_arms(RESULTS / "arithmetic", ARMS)


def test_every_claim_has_a_verdict_a_command_and_evidence():
    claims = list(rows(PAGE, "Verdicts"))
    for claim, verdict, *sources in claims:
        assert re.search(r"\*\*(seen|not seen|undecided)|not measured", verdict), claim
        assert all(re.search(r"`[^`]+`|\]\(|^the same$|^the test$|^none: ", source) for source in sources), claim
        for name in re.findall(r"(?:python -m |pytest |python )([\w/.]+)", " ".join(sources)):
            assert (ROOT / (name if "/" in name else f"{name.replace('.', '/')}.py")).exists(), name
    assert {len(row) for row in claims} == {2, 4}  # the paper's claims share one command


@pytest.mark.parametrize("row", list(zip(ROW_OF_ARM, rows(PAGE, "A real model"), strict=True)), ids=lambda row: row[0])
def test_figures_of_the_real_model(row, arms):
    arm, (_, reward, last, by_seed, engine, *mismatch) = row
    cells = arm_table({arm: arms[arm]}).splitlines()[-1].strip("| ").split(" | ")[2:]
    figures = [cell.split()[0] for cell in cells]  # without the intervals
    assert by_seed == ", ".join(f"{run.settings['full_precision']:.2f}"[1:] for run in arms[arm].values())
    assert [float(figures[i]) for i in (0, 1, 3)] == pytest.approx([*map(float, (reward, last, engine))], abs=0.0051)
    assert mismatch == [figures[i] for i in (4, 5, 7)]


def test_every_interval_is_in_the_study_or_follows_from_stored_runs(arms):
    intervals = re.findall(r"\.\d+ ± \.\d+", PAGE.read_text())
    known = (ROOT / "benchmarks" / "study.md").read_text() + contrast_table(arms).replace("0.", ".")
    assert len(intervals) > 12
    assert [interval for interval in intervals if interval not in known] == []
