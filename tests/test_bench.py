"""`trl-qurl bench`: real steps of a tiny model, the range by hand, errors before slow work."""

import itertools
import json
import multiprocessing
import socket
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from tiny import ENGINE, tiny_model

from benchmarks.shapes import SHAPES
from trl_qurl.cli import main
from trl_qurl.lab.bench import run, trial
from trl_qurl.lab.bench.child import Child
from trl_qurl.lab.bench.plan import Job, Load
from trl_qurl.lab.bench.trial import random_model
from trl_qurl.lab.bench.verdict import Speedup, speedup, verdict
from trl_qurl.lab.demo.task import build_tokenizer

SMALL = "--prompt-len 16 --completion-len 12 --batch 8 --train-batch 2"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A directory with a config alone; results go beside it."""
    monkeypatch.chdir(tmp_path)
    tiny_model().config.save_pretrained(tmp_path / "model")
    return f"{tmp_path}/model"


def save_config(directory, size):
    SHAPES[size].build(torch.bfloat16, torch.device("meta")).config.save_pretrained(directory)


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


VERDICTS = """\
INT8 makes a step 1.21 (1.15 to 1.26) times as fast.
INT8 makes a step slower: 0.94 (0.90 to 0.99) times as fast.
INT8: no difference larger than the noise: a step is 1.01 (1.00 to 1.04) times as fast.
INT8: no verdict yet, 5 of 6 pairs. So far a step is 1.21 (1.15 to 1.26) times as fast. Raise --minutes, or lower the load."""


def test_the_verdict():
    gains = [
        Speedup(1.15, 1.21, 1.26, 6),
        Speedup(0.9, 0.94, 0.99, 6),
        Speedup(1.0, 1.01, 1.04, 30),
        Speedup(1.15, 1.21, 1.26, 5),
    ]
    assert "\n".join(verdict("INT8", gain, "a step") for gain in gains) == VERDICTS


FITS = """\
MODEL: 7.62 billion parameters, training all weights
A step: 64 completions of 512 tokens to prompts of 256; updates: 1, in passes of 8
Memory by calculation: 121.8 GB for weights, gradients and AdamW, 24.0 GB for an engine beside it, of 80.0 GB
Formats: 16 bits, INT8; the engine alone, one format after another, for 10 minutes
MODEL: 7.62 billion parameters, training an adapter of rank 16
A step: 64 completions of 512 tokens to prompts of 256; updates: 1, in passes of 8
Memory by calculation: 31.1 GB for weights, gradients and AdamW, 24.0 GB for an engine beside it, of 80.0 GB
Formats: 16 bits, INT8; one format after another, for 10 minutes
MODEL: 7.62 billion parameters, training an adapter of rank 16
A step: 64 completions of 512 tokens to prompts of 256; updates: 1, in passes of 8
Memory by calculation: 31.1 GB for weights, gradients and AdamW, 120.0 GB for an engine beside it, of 400.0 GB
Formats: 16 bits, INT8; steps in turns, for 10 minutes
"""


def test_a_dry_run_says_what_fits(tmp_path, monkeypatch, capsys):
    """Of the 7.62 billion parameters of Qwen2.5-7B, each takes 16 bytes; an engine has 30 % of the
    GPU.
    """
    save_config(tmp_path / "MODEL", "7B")
    monkeypatch.chdir(tmp_path)
    for options in ("80", "80 --lora-rank 16", "400 --lora-rank 16"):
        command = f"bench MODEL --scheme int8 --dry-run {options}"
        assert main(command.split()) == 0
    assert capsys.readouterr().out == FITS


MACHINES = {
    "H200": ((9, 0), 141),
    "A100": ((8, 0), 80),
    "A30": ((8, 0), 24),
    "L40S": ((8, 9), 48),
    "CPU": (None, 141),
}
"""Compute capability, and gigabytes of memory."""


@pytest.mark.parametrize("size", ["0.5B", "7B"])
def test_a_small_model_on_a_large_gpu_with_fast_memory(size, tmp_path, capsys, monkeypatch):
    save_config(tmp_path, size)
    told = set()
    for name, (capability, gigabytes) in MACHINES.items():
        monkeypatch.setattr(
            "trl_qurl.quantization.formats.gpu_capability", lambda at=capability: at
        )
        command = f"bench {tmp_path} --scheme int8 --dry-run {gigabytes}"
        assert main(command.split()) == 0
        if "Calculated, not measured" in capsys.readouterr().out:
            told.add(name)
    assert told == ({"H200", "A100"} if size == "0.5B" else set())


MISTAKES = """\
--minutes 0 => --minutes is 0
--prompt-len 0 => --prompt-len is 0: give 1 or more
--lora-rank -1 => --lora-rank is -1: give 0 or more
--batch 12 => --batch is 12, but groups of at least two completions, passes of 8 and 1 updates need a multiple of 8:
--completion-len 500 => completions of 500 tokens do not fit into the model's context of 128: shorten
--ignore re:.* => nothing to quantize
--vllm-server-base-url http://a,http://b => has 2 servers, and --scheme 1 formats
--vllm-server-base-url http://127.0.0.1:9 => No server answers at http://127.0.0.1:9
--dry-run -1 => --dry-run is -1
--output /proc/bench.json => /proc/bench.json, where no file can be written"""


@pytest.mark.parametrize("mistake", MISTAKES.splitlines())
def test_a_mistake_is_refused(mistake, model, capsys):
    options, named = mistake.split(" => ")
    command = f"bench {model} --prompt-len 16 --completion-len 16 --scheme int8 {options}"
    assert main(command.split()) == 2
    assert named in capsys.readouterr().err


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
        assert job.engine["vllm_engine_kwargs"]["dtype"] == "float16"
        self.fault = "no kernel" if job.formats == "fp8" else None
        if function == "train":
            self.fault = "CUDA out of memory"

    def step(self):
        if self.fault:
            raise ChildProcessError(self.fault)
        return {"rollout": 2.0, "host": 0.5, "peak": 1.0}

    def stop(self):
        """Nothing runs."""


MEASURED = """\
16 bits: starting, with a step that does not count
INT8: starting, with a step that does not count
FP8: starting, with a step that does not count
Not enough memory for steps in turns.
16 bits: starting, with a step that does not count
INT8: starting, with a step that does not count
FP8: starting, with a step that does not count
Not enough memory for one format after another.
16 bits: starting, with a step that does not count
16 bits: that one took 2 s
INT8: starting, with a step that does not count
INT8: that one took 2 s
FP8: starting, with a step that does not count
Results: bench.json
                               Seconds

 format  tok/s sync rollout score update step  GB       times as fast
 ────────────────────────────────────────────────────────────────────
 16 bits    48    -       2     -      -    - 1.0
 INT8       48    -       2     -      -    - 1.0 1.00 (1.00 to 1.00)

16 bits: a token takes 15625.0 us in the engine's steps, and 5208.3 us of the host's time around them.
INT8: a token takes 15625.0 us in the engine's steps, and 5208.3 us of the host's time around them.
INT8: no verdict yet, 2 of 6 pairs. So far a rollout is 1.00 (1.00 to 1.00) times as fast. Raise --minutes, or lower the load.
FP8 was not measured. no kernel"""


def test_the_engine_is_measured_alone_if_training_runs_out_of_memory(model, monkeypatch, capsys):
    """On a device without bfloat16. Of 2 s for 96 tokens, 0.5 s are the host's. Of 6 s for three
    formats, each has two, by a clock that moves on whenever it is read.
    """
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr("trl_qurl.quantization.formats.emulates_bfloat16", lambda: True)
    monkeypatch.setattr(run, "Child", Scripted)
    command = f"bench {model} {SMALL} --scheme int8,fp8 --minutes 0.1"
    assert main(command.split()) == 0
    _, printed = capsys.readouterr().out.split(" for 0.1 minutes\n")
    lines = [line.rstrip() for line in printed.splitlines()]
    assert "\n".join(lines) == MEASURED
    record = json.loads(Path("bench.json").read_text())
    assert record["way"].startswith("the engine alone")
    assert [*record["steps"]] == ["none", "int8"]


def test_no_prompt_is_cached_when_the_engine_is_measured_alone(model, monkeypatch):
    llm = MagicMock()
    pipe = MagicMock()
    pipe.recv.side_effect = [None, None, EOFError]
    monkeypatch.setattr(trial, "start_engine", lambda job: (llm, None))
    with pytest.raises(EOFError):
        trial.generate(Job(model, Load(), False, [], "int8", {}), "output", pipe)
    called = [name for name, _, _ in llm.method_calls]
    assert called == ["reset_prefix_cache", "generate"] * 2


def test_training_has_the_sixteen_bits_of_the_device(model, monkeypatch):
    monkeypatch.setattr(trial, "full_precision", lambda: ("FP16", "float16"))
    monkeypatch.setattr(trial, "cpu_settings", dict)
    monkeypatch.setattr("trl_qurl.QuRLGRPOConfig", lambda directory, **settings: settings)
    monkeypatch.setattr("trl_qurl.QuRLGRPOTrainer", lambda *given, **more: given[2])
    settings = trial.build_trainer(Job(model, Load(), False, [], "int8", {}), "output")
    assert settings["fp16"]
    assert not settings["bf16"]


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
def bench(warm_spawn, model, monkeypatch):
    """Run the command on the tiny model, in a launcher's process whose port is taken; its record."""

    def run(*options):
        command = f"bench {model} {SMALL} --scheme int8 --minutes 0.01"
        assert main([*command.split(), *options]) == 0
        return json.loads(Path("bench.json").read_text())

    launcher = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, value in {**launcher, "MASTER_PORT": taken.getsockname()[1]}.items():
            monkeypatch.setenv(name, str(value))
        yield run


COLOCATED = ["--engine-kwargs", json.dumps(ENGINE)]


@pytest.mark.vllm
@pytest.mark.xdist_group("bench")
@pytest.mark.parametrize(
    "further",
    [["--updates", "2"], pytest.param(["--lora-rank", "4"], marks=pytest.mark.slow)],
    ids=["whole", "adapter"],
)
def test_steps_of_the_real_trainer(bench, further):
    record = bench(*COLOCATED, *further)
    assert record["way"] == "steps in turns"
    assert not record["failures"]
    assert [*record["steps"]] == ["none", "int8"]
    for [step, *_] in record["steps"].values():
        parts = [step[part] for part in ("sync", "rollout", "score", "update")]
        assert 0 < sum(parts) <= 1.02 * step["step"], "the parts are no more than the step"
        assert (step["score"] > 0) == ("--updates" in further), "scored in the update if it is one"
        assert 0.1 < step["peak"] < 10
        assert 0 < step["host"] < step["rollout"] / 2, "a model on a CPU is slower than its host"


@pytest.mark.vllm
@pytest.mark.xdist_group("bench")
def test_an_engine_alone(bench, monkeypatch):
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    record = bench(*COLOCATED)
    assert record["way"].startswith("the engine alone")
    for [step, *_] in record["steps"].values():
        assert step.keys() == {"rollout", "host", "peak"}
        assert 0 < step["host"] < step["rollout"]


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_a_server(bench, int8_server):
    record = bench("--vllm-server-base-url", int8_server.url)
    [[step, *_]] = record["steps"].values()
    assert step["sync"] > 0
    assert step["rollout"] > 0
    assert "host" not in step
