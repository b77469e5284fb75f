"""`make baselines` compares figures with stored ones."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STORED = {"startup": 0.05, "decode": 0.6}


@pytest.fixture
def compare(monkeypatch, tmp_path, capsys):
    """Run the command with measurements that take minutes replaced by their results."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as for a script
    baselines = importlib.import_module("baselines")
    path = tmp_path / "kind.json"

    def compare(*arguments, **found):
        parts = {name: lambda _, name=name: {name: found[name]} for name in found}
        monkeypatch.setattr(baselines, "PARTS", parts)
        monkeypatch.setattr(sys, "argv", ["baselines.py", "--baselines", str(path), *arguments])
        status = baselines.main()
        return status, capsys.readouterr().out, json.loads(path.read_text())["figures"]

    return compare


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        # at most twice as long, at least three quarters as fast
        ({"startup": 0.099, "decode": 0.46}, []),
        ({"startup": 0.101, "decode": 6.0}, ["startup"]),
        ({"startup": 0.001, "decode": 0.44}, ["decode"]),
    ],
)
def test_a_worse_figure_fails_and_is_not_stored(compare, now, worse):
    compare(**STORED)
    status, printed, stored = compare(**now)
    assert (status, stored) == (bool(worse), STORED)
    assert not worse or f": {', '.join(worse)}. If that is intended" in printed


def test_new_figures_are_stored_if_asked_to(compare):
    assert compare(**STORED)[::2] == (0, STORED)
    assert compare(startup=0.05, rounding=9.0)[::2] == (0, STORED)
    assert compare("--store", startup=0.5)[::2] == (0, STORED | {"startup": 0.5})
