"""The demo with a critic, as `make demo-ppo` runs it, for two rollouts."""

import subprocess
import sys

import pytest
from conftest import child_environment

from trl_qurl.trainers.run_log import read_run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_ppo(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    command = [sys.executable, "-m", "trl_qurl", "demo", "--algorithm", "ppo"]
    command += ["--rollouts", "2", "--required-rise", "-1", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "full-precision policy, expected" in done.stdout
    run = read_run(tmp_path)
    assert len(run.series("critic/explained_variance")) == 2
    rates, seconds = dict(run.series("throughput/generated_tokens_per_s")), dict(run.series("time/generate_s"))
    tokens = {step: rate * seconds[step] for step, rate in rates.items()}
    assert max(tokens.values()) < 256 * 5 + 1, "a row counts its own rollout, not the measurements around the training"
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
