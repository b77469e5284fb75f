"""`make baselines` compares figures with stored ones."""

import json
import sys

import pytest

STORED = {"startup": 0.05, "decode": 0.6}


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        # at most twice as long, at least three quarters as fast
        ({"startup": 0.099, "decode": 0.46}, ""),
        ({"startup": 0.101, "decode": 6.0}, "startup"),
        ({"startup": 0.001, "decode": 0.44}, "decode"),
    ],
)
def test_a_worse_figure_fails_and_is_not_stored(now, worse, script, monkeypatch, tmp_path, capsys):
    """With measurements that take minutes replaced by their results."""
    baselines = script("benchmarks", "baselines")
    path = tmp_path / "kind.json"
    monkeypatch.setattr(sys, "argv", ["baselines.py", "--baselines", str(path)])
    for found, failure in ((STORED, ""), (now, worse)):
        monkeypatch.setattr(baselines, "PARTS", {"all": lambda _, found=found: found})
        assert baselines.main() == bool(failure)
        assert failure in capsys.readouterr().out
        assert json.loads(path.read_text())["figures"] == STORED
