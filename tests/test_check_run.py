"""Assertions about a run, from the command line and from recipes."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import child_environment

ROOT = Path(__file__).parents[1]
RECIPES = [path for path in (ROOT / "trl_qurl").rglob("*.yaml") if path.parent.name != "variants"]


@pytest.fixture
def check(warm_python, tmp_path):
    # 0.1, 0.2, ... 1
    rows = [{"step": step, "reward": step / 10, "mismatch/kl_k3": 0.01} for step in range(1, 11)]
    lines = [{"settings": {}}, *rows, {"step": 11, "critic/explained_variance": 0.5}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def check(*arguments: str | Path) -> subprocess.CompletedProcess:
        command = [warm_python, ROOT / "benchmarks" / "check_run.py", tmp_path, *arguments]
        environment = child_environment(PYTHONPATH=str(ROOT))
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return check


def test_assertions_that_hold_and_that_do_not(check):
    # Of the last two 0.9 and 1, mean 0.95; of the first two 0.1 and 0.2, median 0.15.
    done = check(
        "mean(reward[-2:]) > 0.94",
        "median(reward[:2]) >= 0.15",
        "max(reward) <= 1",
        "min(reward[1:3])<0.21",
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 4
    done = check("mean(reward[-2:]) > mean(reward)", "mean(reward[-2:]) > 0.96")
    assert done.returncode == 1
    assert "FAILED  mean(reward[-2:]) > 0.96    (0.95 > 0.96)" in done.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_say_how_to_see_that_a_run_went_well(check, recipe):
    documented = re.findall(r"`([\w/@]+)`", (ROOT / "docs" / "metrics.md").read_text())
    for metric in re.findall(r"^# assert:.*?\(([\w/]+)", recipe.read_text(), re.MULTILINE):
        assert metric == "reward" or metric in documented
    # There are fewer than forty rewards, so the first twenty are the last twenty.
    done = check("--recipe", recipe)
    assert done.stdout.splitlines()[0].startswith(
        "FAILED  mean(reward[-20:]) > mean(reward[:20])"
    ), done.stderr
    assert all(line.startswith("ok") for line in done.stdout.splitlines()[1:])
