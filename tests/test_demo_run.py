"""The demo with a critic, as `make demo-ppo` runs it, for two rollouts."""

import subprocess
import sys

import pytest
from conftest import child_environment

from trl_qurl.trainers.run_log import read_run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_ppo_beside_bf16_rollouts(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    command = [sys.executable, "-m", "trl_qurl", "demo", "--algorithm", "ppo", "--compare", "none"]
    command += ["--rollouts", "2", "--required-rise", "-1", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Means of the last 10 rollouts" in done.stdout
    for directory in (tmp_path, tmp_path / "bf16"):
        assert len(read_run(directory).series("critic/explained_variance")) == 2
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
