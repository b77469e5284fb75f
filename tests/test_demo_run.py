"""The demo with a critic, as `make demo-ppo` runs it, for two rollouts."""

import csv
import subprocess
import sys

import pytest
from conftest import child_environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_ppo_beside_bf16_rollouts(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    command = [sys.executable, "-m", "trl_qurl", "demo", "--algorithm", "ppo", "--compare", "none"]
    command += ["--rollouts", "2", "--required-rise", "-1", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Means of the last 10 rollouts" in done.stdout
    for log in (tmp_path / "log.csv", tmp_path / "bf16" / "log.csv"):
        with log.open(newline="") as file:
            assert [row["critic/explained_variance"] != "" for row in csv.DictReader(file)] == [True, True]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
