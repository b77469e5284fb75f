"""The demo with a critic and with RLOO, as `make demo-ppo` and `make demo-rloo` run it, for two
rollouts.
"""

import subprocess
import sys

import pytest
from conftest import child_environment

from trl_qurl.lab.runs import read_run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("algorithm", ["ppo", "rloo"])
def test_the_demo_learns_something_and_draws_it(algorithm, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    command = [sys.executable, "-m", "trl_qurl", "demo", "--algorithm", algorithm]
    command += ["--rollouts", "2", "--required-share", "-9", "--output-dir", str(tmp_path)]
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (
        "full-precision policy, expected" in done.stdout
        and "\nNext: trl-qurl demo --model " in done.stdout
    )
    run = read_run(tmp_path)
    assert len(run.series("critic/explained_variance")) == (2 if algorithm == "ppo" else 0)
    assert len(run.series("mismatch/kl_k3")) == 2 and run.settings["algorithm"] == algorithm.upper()
    rates, seconds = (
        dict(run.series("throughput/generated_tokens_per_s")),
        dict(run.series("time/generate_s")),
    )
    tokens = {step: rate * seconds[step] for step, rate in rates.items()}
    assert max(tokens.values()) < 256 * 5 + 1, (
        "a row counts its own rollout, not the measurements around the training"
    )
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
