"""`trl-qurl demo` with each algorithm, for two rollouts of a policy with random weights."""

import subprocess

import pytest
from conftest import child_environment, completed
from documents import ROOT

from trl_qurl.cli import main
from trl_qurl.lab.demo import task, warm_start
from trl_qurl.lab.runs import read_run

FIRST_IS_ENOUGH = [
    "grpo",
    pytest.param("ppo", marks=pytest.mark.slow),
    pytest.param("rloo", marks=pytest.mark.slow),
]


def test_bad_arguments_are_refused(capsys):
    assert main(["demo", "--rollouts", "0"]) == 2
    assert "--rollouts is 0" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.xdist_group("colocated")
@pytest.mark.parametrize("algorithm", FIRST_IS_ENOUGH)
def test_the_demo_compares_and_draws(algorithm, warm_python, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    policy = warm_start.build_model(task.build_tokenizer(), seed=0)
    monkeypatch.setattr(warm_start, "train_warm_start", lambda *_: policy)
    warm_start.cached_warm_start(warm_start.WarmStartSettings(), tmp_path / "cache")

    options = ["--algorithm", algorithm, "--rollouts", "2", "--output-dir", "out"]
    cache = str(tmp_path / "cache")
    shell = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [warm_python, "-m", "trl_qurl", "demo", *options],
        cwd=tmp_path,
        env=child_environment(TRL_QURL_CACHE=cache, COLUMNS="80", **shell),
        capture_output=True,
        text=True,
        timeout=500,
    )
    # Two rollouts teach this policy nothing.
    assert done.returncode == 1, done.stderr[-4000:]
    assert "the demo failed: the policy's accuracy went from 0.000 to 0.000" in done.stderr
    printed = " ".join(done.stdout.split())
    assert "of the actor's 512 greedy answers changed" in printed
    assert "solved 0.0% before and 0.0% after" in printed
    compared = "the stored 16-bit run solved" if algorithm == "grpo" else "no 16-bit run of"
    assert compared in printed
    proposed = done.stdout.splitlines()[-1].partition(": ")[2]
    assert proposed.endswith("trl-qurl mismatch HuggingFaceTB/SmolLM2-135M-Instruct")
    completed("sh", "-c", f"{proposed} --help", cwd=tmp_path, **shell)
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")

    run = read_run(tmp_path / "out")
    assert run.settings["algorithm"] == algorithm.upper()
    assert len(run.series("critic/returns_mean")) == (2 if algorithm == "ppo" else 0)
    assert len(run.series("mismatch/kl_k3")) == len(run.series("expected_accuracy")) == 2
    rates = dict(run.series("throughput/generated_tokens_per_s"))
    seconds = dict(run.series("time/generate_s"))
    tokens = max(rate * seconds[step] for step, rate in rates.items())
    # a row counts its own rollout, not the measurements around the training
    assert tokens < 256 * 5 + 1
