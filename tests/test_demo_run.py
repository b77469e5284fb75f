"""`trl-qurl demo` with each algorithm, for two rollouts of a policy with random weights."""

import sys

import pytest
from conftest import completed
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


def test_the_command_that_is_proposed_works_in_a_new_shell(tmp_path):
    shell = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ROOT}
    code = "from trl_qurl.lab.processes import name_of_command; print(name_of_command())"
    name = completed(sys.executable, "-c", code, cwd=tmp_path, **shell).stdout.strip()
    completed("sh", "-c", f"{name} mismatch MODEL --help", cwd=tmp_path, **shell)


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
    environment = {"TRL_QURL_CACHE": f"{tmp_path}/cache", "PYTHONPATH": ROOT, "COLUMNS": "80"}
    command = [warm_python, "-m", "trl_qurl", "demo", *options]
    # Two rollouts teach this policy nothing.
    done = completed(*command, cwd=tmp_path, status=1, **environment)
    assert "the demo failed: the policy's accuracy went from 0.000 to 0.000" in done.stderr
    printed = " ".join(done.stdout.split())
    start = "Starting vLLM: its rollouts compute with INT8, the policy learns with 32 bits"
    assert f"tiny-qwen2 {start}" in printed
    assert "of the actor's 512 greedy answers changed" in printed
    assert "solved 0.0% before and 0.0% after" in printed
    compared = "the stored 16-bit run solved" if algorithm == "grpo" else "no 16-bit run of"
    assert compared in printed
    assert printed.endswith("trl-qurl mismatch HuggingFaceTB/SmolLM2-135M-Instruct")
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")

    run = read_run(tmp_path / "out")
    assert run.settings["algorithm"] == algorithm.upper()
    assert run.settings["objective"] == ("tis" if algorithm == "rloo" else "acr")
    assert len(run.series("critic/returns_mean")) == (2 if algorithm == "ppo" else 0)
    assert len(run.series("mismatch/kl_k3")) == len(run.series("expected_accuracy")) == 2
    rates = dict(run.series("throughput/generated_tokens_per_s"))
    seconds = dict(run.series("time/generate_s"))
    tokens = max(rate * seconds[step] for step, rate in rates.items())
    # a row counts its own rollout, not the measurements around the training
    assert tokens < 256 * 5 + 1
