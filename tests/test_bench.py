"""`trl-qurl bench`: real steps of a tiny model, the range by hand, errors before slow work."""

import json
import multiprocessing
import socket
from pathlib import Path

import psutil
import pytest
import torch
from tiny import ENGINE, tiny_model

from benchmarks.shapes import SHAPES
from trl_qurl.cli import main
from trl_qurl.lab.bench import run
from trl_qurl.lab.bench.child import Child
from trl_qurl.lab.bench.plan import Job, Load
from trl_qurl.lab.bench.trial import random_model
from trl_qurl.lab.bench.verdict import Speedup, compare, speedup, verdict
from trl_qurl.lab.demo.task import build_tokenizer

SMALL = ["--prompt-len", "16", "--completion-len", "12", "--batch", "8", "--train-batch", "2"]


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A directory with a config alone; results go beside it."""
    monkeypatch.chdir(tmp_path)
    tiny_model().config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def qwen_7b(tmp_path):
    """A config with the 7.62 billion parameters of Qwen2.5-7B."""
    model = SHAPES["7B"].build(torch.bfloat16, torch.device("meta"))
    model.config.save_pretrained(tmp_path)
    return str(tmp_path)


# What is said
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [(1, 1, 1), (8, 1, 8), (9, 2, 8), (20, 6, 15)],
)
def test_the_range_holds_the_median_with_a_confidence_of_95_percent(pairs, low, high):
    """The ratios are 1, 2, 3, ...; the bounds are those of tables of the sign test."""
    found = speedup(range(pairs, 0, -1), [1] * pairs)
    assert found == (low, (1 + pairs) / 2, high, pairs)


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (Speedup(1.15, 1.21, 1.26, 6), "INT8 makes a step 1.21 (1.15 to 1.26) times as fast"),
        (Speedup(0.9, 0.94, 0.99, 6), "makes a step slower: 0.94 (0.90 to 0.99)"),
        (Speedup(0.97, 1.01, 1.04, 30), "no difference larger than the noise"),
        (Speedup(1.15, 1.21, 1.26, 5), "INT8: no verdict yet, 5 of 6 pairs. So far a step is 1.21"),
    ],
)
def test_the_verdict(gain, said):
    assert said in verdict("INT8", gain, "a step")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        # 7.62e9 x 16 bytes; an engine has 30 % of the GPU
        (["--dry-run", "80"], ["121.8 GB for weights", "24.0 GB for an engine", "engine alone"]),
        (["--dry-run", "80", "--lora-rank", "16"], ["31.1 GB for weights", "one format after"]),
        (["--dry-run", "400", "--lora-rank", "16"], ["120.0 GB for an engine", "in turns"]),
    ],
)
def test_a_dry_run_says_what_fits(qwen_7b, capsys, options, said):
    assert main(["bench", qwen_7b, "--scheme", "int8", *options]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert all(words in printed for words in ["7.62 billion", "16 bits, INT8", *said]), printed


@pytest.mark.parametrize(
    ("size", "capability", "gigabytes", "is_told"),
    [
        ("0.5B", (9, 0), "141", True),
        ("0.5B", (8, 0), "80", True),
        ("0.5B", (8, 0), "24", False),  # an A30
        ("0.5B", (8, 9), "48", False),  # Ada's memory is slow
        ("7B", (9, 0), "141", False),
        ("0.5B", None, "141", False),
    ],
)
def test_a_small_model_on_a_large_gpu(
    size, capability, gigabytes, is_told, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("trl_qurl.quantization.formats.gpu_capability", lambda: capability)
    SHAPES[size].build(torch.bfloat16, torch.device("meta")).config.save_pretrained(tmp_path)
    command = ["bench", str(tmp_path), "--scheme", "int8", "--dry-run", gigabytes]
    assert main(command) == 0
    assert ("Calculated, not measured" in capsys.readouterr().out) == is_told


def test_a_token_inside_and_outside_of_the_engine():
    """Of 4 s for 2,000 tokens, 1 s is the host's: 500 us a token. A server does not tell."""
    colocated = {"rollout": 4.0, "host": 1.0, "step": 5.0, "peak": 1.0}
    served = {"rollout": 4.0, "step": 5.0, "peak": 1.0}
    _, sentences = compare({"int8": [colocated], "fp8": [served]}, 2000)
    told = [sentence for sentence in sentences if "a token takes" in sentence]
    assert told == [
        "INT8: a token takes 1500.0 us in the engine's steps, and 500.0 us of the host's time "
        "around them."
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--minutes", "0"], ["--minutes"]),
        (["--prompt-len", "0"], ["--prompt-len", "1 or more"]),
        (["--lora-rank", "-1"], ["--lora-rank", "0 or more"]),
        (["--batch", "12"], ["--batch", "12", "multiple of 8"]),
        (["--completion-len", "500"], ["500", "128", "--completion-len"]),
        (["--ignore", "re:.*"], ["nothing to quantize"]),
        (["--vllm-server-base-url", "http://a,http://b"], ["2 servers", "--scheme", "1"]),
        (["--vllm-server-base-url", "http://127.0.0.1:9"], ["No server", "http://127.0.0.1:9"]),
        (["--dry-run", "-1"], ["--dry-run", "-1"]),
        (["--output", "/proc/bench.json"], ["/proc/bench.json", "another directory"]),
    ],
)
def test_a_mistake_is_refused(model, capsys, options, named):
    small = ["--prompt-len", "16", "--completion-len", "16", "--scheme", "int8"]
    assert main(["bench", model, *small, *options]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in named), error


def test_a_model_that_is_not_there_is_refused(capsys):
    assert main(["bench", "./nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


# What is measured
# --------------------------------------------------------------------------------------------------


def test_no_digit_of_the_prompts_is_padding_to_the_model(tmp_path):
    """SmolLM2 pads with token 2, which is the prompts' 0: a prompt that began with it gave a
    gradient of NaN.
    """
    ids = build_tokenizer()("01234567", return_tensors="pt")["input_ids"]
    padding = ids[0, 0].item()
    tiny_model("llama", num_hidden_layers=30, pad_token_id=padding).config.save_pretrained(tmp_path)
    model = random_model(str(tmp_path), "cpu")
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


class Scripted:
    """Stands for the processes: training runs out of memory, and FP8 has no kernel."""

    def __init__(self, function, job):
        self.fault = "no kernel" if job.formats == "fp8" else None
        if function == "train":
            self.fault = "CUDA out of memory"

    def step(self):
        if self.fault:
            raise ChildProcessError(self.fault)
        return {"rollout": 2.0, "peak": 1.0}

    def stop(self):
        """Nothing runs."""


def test_the_engine_is_measured_alone_if_training_runs_out_of_memory(model, monkeypatch, capsys):
    monkeypatch.setattr(run, "Child", Scripted)
    assert main(["bench", model, *SMALL, "--scheme", "int8,fp8", "--minutes", "0.0001"]) == 0
    printed = capsys.readouterr().out
    assert "Not enough memory for steps in turns" in printed
    assert "INT8: that one took 2 s" in printed, "which says how long the others will take"
    assert "FP8 was not measured. no kernel" in printed
    record = json.loads(Path("bench.json").read_text())
    assert record["way"].startswith("the engine alone") and [*record["steps"]] == ["none", "int8"]
    assert "a rollout is 1.00" in printed


@pytest.fixture
def warm_spawn(warm_python):
    """Start processes that have imported everything."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(warm_python))
    yield
    multiprocessing.set_executable(before)


def test_the_output_of_a_process_that_fails_is_shown(warm_spawn):
    child = Child("train", Job("./nowhere", Load(), False, [], "int8", {}))
    with pytest.raises(ChildProcessError, match="status 1(?s:.*)nowhere"):
        child.step()
    child.stop()


@pytest.fixture
def bench(warm_spawn, model, capsys, monkeypatch):
    """Run the command on the tiny model, in a launcher's process whose port is taken; its record,
    and what it printed.
    """

    def run(*options):
        command = ["bench", model, *SMALL, "--minutes", "0.01", *options]
        assert main(command) == 0
        return json.loads(Path("bench.json").read_text()), capsys.readouterr().out

    launcher = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, value in {**launcher, "MASTER_PORT": taken.getsockname()[1]}.items():
            monkeypatch.setenv(name, str(value))
        yield run


COLOCATED = ["--scheme", "int8", "--engine-kwargs", json.dumps(ENGINE)]


@pytest.mark.vllm
@pytest.mark.xdist_group("bench")
@pytest.mark.parametrize(
    "further",
    [["--updates", "2"], pytest.param(["--lora-rank", "4"], marks=pytest.mark.slow)],
    ids=["whole", "adapter"],
)
def test_steps_of_the_real_trainer(bench, further):
    record, printed = bench(*COLOCATED, *further)
    assert record["way"] == "steps in turns" and not record["failures"]
    assert [*record["steps"]] == ["none", "int8"]
    for [step, *_] in record["steps"].values():
        parts = [step[part] for part in ("sync", "rollout", "score", "update")]
        assert 0 < sum(parts) <= 1.02 * step["step"], "the parts are no more than the step"
        assert (step["score"] > 0) == ("--updates" in further), "scored in the update if it is one"
        assert 0.1 < step["peak"] < 10
        assert 0 < step["host"] < step["rollout"] / 2, "a model on a CPU is slower than its host"
    assert "INT8: no verdict yet, " in printed


@pytest.mark.vllm
@pytest.mark.xdist_group("bench")
def test_an_engine_alone(bench, monkeypatch):
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    record, printed = bench(*COLOCATED)
    assert record["way"].startswith("the engine alone")
    for [step, *_] in record["steps"].values():
        assert step.keys() == {"rollout", "host", "peak"} and 0 < step["host"] < step["rollout"]
    assert "so far a rollout is" in printed.lower()


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_a_server(bench, int8_server):
    record, printed = bench("--scheme", "int8", "--vllm-server-base-url", int8_server.url)
    [[step, *_]] = record["steps"].values()
    assert step["sync"] > 0 and step["rollout"] > 0 and "host" not in step
