"""Assertions about a run, from the command line and from recipes."""

import json
import re

import pytest
from documents import ROOT, inline_code

RECIPES = [path for path in (ROOT / "trl_qurl").rglob("*.yaml") if path.parent.name != "variants"]
ROWS = [{"step": step, "reward": step / 10, "mismatch/kl_k3": 0.01} for step in range(1, 11)]


@pytest.fixture
def check(script, monkeypatch, tmp_path, capsys):
    """Check a run whose rewards are 0.1, 0.2, ... 1; the exit status, and what is printed."""
    command = script("benchmarks", "check_run")
    rows = [{"settings": {}}, *ROWS, {"step": 11, "critic/explained_variance": 0.5}]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "run.jsonl").write_text("".join(lines))

    def check(*arguments):
        monkeypatch.setattr("sys.argv", ["check_run.py", str(tmp_path), *map(str, arguments)])
        return command.main(), capsys.readouterr().out.splitlines()

    return check


@pytest.mark.parametrize(
    ("assertion", "status"),
    [
        ("mean(reward[-2:]) > 0.94", 0),  # of 0.9 and 1
        ("mean(reward[-2:]) > 0.96", 1),
        ("median(reward[:2]) >= 0.15", 0),  # of 0.1 and 0.2
        ("min(reward[1:3])<0.21", 0),
        ("mean(loss) < 1", 2),
    ],
)
def test_assertions_that_hold_that_do_not_and_that_cannot_be_checked(check, assertion, status):
    assert check("max(reward) <= 1", assertion)[0] == status


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_say_how_to_see_that_a_run_went_well(check, recipe):
    documented = " ".join(inline_code(ROOT / "docs" / "metrics.md")).split()
    for metric in re.findall(r"^# assert:.*?\(([\w/]+)", recipe.read_text(), re.MULTILINE):
        if metric != "reward":
            assert metric in documented
    # There are fewer than forty rewards, so the first twenty are the last twenty.
    status, [first, *others] = check("--recipe", recipe)
    assert status == 1
    assert first.startswith("FAILED  mean(reward[-20:]) > mean(reward[:20])")
    for line in others:
        assert line.startswith("ok")
