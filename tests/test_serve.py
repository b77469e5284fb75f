"""`trl-qurl serve`: the checkpoint it prepares, the command it becomes, and how it ends."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import Server
from tiny import tiny_model, tiny_tokenizer

from trl_qurl.quantization.cache import CACHE_VARIABLE
from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.rollout.engine import launch


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def quantized(model, scheme="int8", ignore=("lm_head",)):
    return launch.starting_checkpoint(str(model), scheme, ignore)


def test_the_checkpoint_is_made_once_for_the_same_model_and_settings(model, capsys):
    first = quantized(model)
    made = (first / "model.safetensors").stat().st_mtime_ns
    assert quantized(model) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made
    assert capsys.readouterr().out.count("Quantizing") == 1
    assert len({first, quantized(model, "fp8"), quantized(model, ignore=["lm_head", "re:.*down_proj"])}) == 3


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_model_that_changed_under_its_name_is_quantized_anew(model, name):
    before = launch.content_digest(model)
    contents = (model / name).read_bytes()
    (model / name).write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    assert launch.content_digest(model) != before
    (model / name).write_bytes(contents)
    (model / "notes.md").write_text("not part of the model")
    assert launch.content_digest(model) == before
    (model / name).rename((model / name).with_stem("other"))
    assert launch.content_digest(model) != before


def test_servers_that_start_at_once_quantize_once(model, monkeypatch):
    writes, together = [], threading.Barrier(4)
    write = CheckpointWriter.write

    def slow_write(*arguments):
        writes.append(time.monotonic())
        time.sleep(0.5)
        return write(*arguments)

    def start(_):
        together.wait()
        return quantized(model)

    monkeypatch.setattr(CheckpointWriter, "write", slow_write)
    with ThreadPoolExecutor(4) as executor:
        places = set(executor.map(start, range(4)))
    assert len(places) == len(writes) == 1
    assert {"config.json", "model.safetensors"} <= {path.name for path in places.pop().iterdir()}


@pytest.mark.parametrize(
    ("found", "start"),
    [
        (["vllm"], "-m vllm.entrypoints.cli.main serve MODEL"),
        ([], "-m vllm.entrypoints.openai.api_server --model MODEL"),
    ],
    ids=["CUDA build", "CPU build"],
)
def test_the_command_fits_the_build_of_vllm(found, start, monkeypatch):
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: found if name == "vllm" else [])
    command = " ".join(launch.server_command("MODEL", "127.0.0.1", 8000, ["--max-model-len", "64"]))
    assert start in command
    assert "--host 127.0.0.1 --port 8000" in command
    assert "--logprobs-mode processed_logprobs --max-logprobs -1" in command
    assert "--worker-extension-cls trl_qurl.rollout.engine.worker.RolloutWorker" in command
    assert command.endswith("--max-model-len 64"), "options of vLLM's are passed on"


@pytest.mark.parametrize("cuda", [True, False])
def test_weight_transfer_is_offered_where_there_is_cuda(cuda, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    assert ("--weight-transfer-config" in launch.server_command("MODEL", "127.0.0.1", 8000, [])) == cuda


def test_what_a_user_sets_is_not_set_again():
    command = launch.server_command("MODEL", "127.0.0.1", 8000, ["--max-logprobs=40"])
    assert [part for part in command if part.startswith("--max-logprobs")] == ["--max-logprobs=40"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_nobody_else_reaches_the_loopback_interface(host):
    assert launch.exposure_warning(host, []) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node7"])
def test_any_other_address_is_worth_a_warning(host, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    warning = launch.exposure_warning(host, [])
    assert f"listening on {host} without --api-key" in warning and "replace the weights" in warning
    for further in (["--api-key", "secret"], ["--api-key=secret"]):
        guarded = launch.exposure_warning(host, further)
        assert "without --api-key" not in guarded and "replace the weights, with or without a key" in guarded


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_the_exact_command_is_printed_and_options_are_passed_on(int8_server):
    [line] = [line for line in int8_server.log.read_text().splitlines() if line.startswith("VLLM_SERVER_DEV_MODE=1 ")]
    assert f"--port {int8_server.port}" in line and line.endswith(
        "--enforce-eager --max-model-len 64 --max-num-seqs 16"
    )
    assert "Application startup complete" in int8_server.log.read_text()


@pytest.mark.vllm
def test_control_c_during_the_start_leaves_no_process_behind(model, tmp_path):
    server = Server(model, tmp_path, "--scheme", "int8")
    try:
        deadline = time.monotonic() + 120
        while len(server.survivors()) < 2:  # until vLLM has started its engine's process
            assert time.monotonic() < deadline and server.process.poll() is None
            time.sleep(0.1)
        time.sleep(2)
        server.stop(signal.SIGINT)
        assert not server.survivors_after(10)
    finally:
        server.kill()
