"""Mistakes of users: each gets one sentence that says what to do, before an engine starts, and
leaves no files.
"""

import json
import re
import shutil
import sys

import pytest
import torch
from conftest import free_port
from support.fake_server import URL, FakeServer
from tiny import CHAT_TEMPLATE, MIXTURES, SIXTEEN_BIT_EXPERTS, save_tiny, stream_of, tiny_model
from transformers import Qwen3_5ForCausalLM

from trl_qurl import cli
from trl_qurl.quantization import SCHEMES, write_checkpoint
from trl_qurl.quantization.checks.recurrent import check_recurrent_layers
from trl_qurl.rollout import wire
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.engine import worker
from trl_qurl.rollout.errors import ServerError, SyncError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), CHAT_TEMPLATE)


@pytest.fixture
def plain(model, tmp_path):
    """A command without mistakes."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text((json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n") * 32)
    options = "--use_cpu true --bf16 false --report_to none --max_completion_length 64"
    options += f" --model_name_or_path {model} --dataset {questions}"
    options += f" --output_dir {tmp_path / 'out'} --rollout_checkpoint_dir {tmp_path / 'rollouts'}"
    return ["grpo", *options.split()]


@pytest.fixture
def train(plain, tmp_path, monkeypatch, capfd):
    """Run `trl-qurl grpo` with a mistake, and return its error, which is the only one, comes before
    an engine starts, and leaves no files.
    """

    def run(*arguments):
        # In this process, because importing TRL and vLLM takes longer than the error.
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        status = cli.main([*plain, *map(str, arguments)])
        printed = capfd.readouterr().err
        assert status == 2 and "Traceback" not in printed, printed[-3000:]
        assert "Loading safetensors checkpoint shards" not in printed, "the engine was started"
        [error] = re.findall("^trl-qurl: error: (.+)", printed, re.MULTILINE)
        left = [*tmp_path.rglob("*.safetensors"), *tmp_path.glob("rollouts/*")]
        assert not left, f"something half-written was left: {left}"
        return error

    return run


# Parts that are not installed
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "arguments", "advice"),
    [
        ("llmcompressor", ["--weight_sync", "llmcompressor"], "trl-qurl[llmcompressor]"),
        ("math_verify", [], "trl-qurl[math]"),
        ("vllm", ["--vllm_mode", "server"], "trl-qurl[vllm]"),  # TRL imports it all the same
    ],
)
def test_another_package_missing(package, arguments, advice, train, model, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install '{advice}'" in train(*arguments)
    if package == "vllm":
        assert cli.main(["serve", str(model)]) == 2
        assert f"pip install '{advice}'" in capfd.readouterr().err


# Settings
# --------------------------------------------------------------------------------------------------


def test_an_error_of_transformers_is_one_line(train):
    assert "--report_to wandbb" in train("--report_to", "wandbb")


def test_questions_that_do_not_fill_a_rollout(train, tmp_path):
    (tmp_path / "few.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 31)
    message = train("--dataset", tmp_path / "few.jsonl")
    assert re.search("31 prompts.* needs 32: per_device_train_batch_size=16", message)


def test_tokenizer_without_a_chat_template(train, tmp_path):
    base = save_tiny(tmp_path / "base")
    (base / "model.safetensors").unlink()
    message = train("--model_name_or_path", base)
    assert all(part in message for part in (str(base), "Instruct", "chat_template"))


# What engines cannot run
# --------------------------------------------------------------------------------------------------


def amx(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_tile": True})


def ampere(monkeypatch):
    monkeypatch.setattr("trl_qurl.rollout.checks.hardware.gpu_capability", lambda: (8, 0))


def any_hardware(monkeypatch):
    pass


IN_16_BITS = "--quantization_ignore " + " ".join(SIXTEEN_BIT_EXPERTS)
ADAPTER = (
    "--use_peft --lora_target_modules q_proj v_proj --weight_sync adapter --smooth_activations "
    "false"
)
FLOAT32 = '--vllm_engine_kwargs {"dtype":"float32"}'
BFLOAT16 = "dtype='bfloat16', not '{}': set it in vllm_engine_kwargs"
BACKEND = "transformers backend: set rollout_quantization=None"
NO_ADAPTER = "weight_sync='auto', no --enable-lora"
GPT_OSS = "experts of gpt-oss"
ROUTING = "not of glm4_moe: add 're:"
SIZES = "not 128 and 80: add 're:"
CAPABILITY = "compute capability 8.9"
SERVED_ONLY = (ROUTING, SIZES)  # in a colocated engine, experts stay in 16 bits
# hardware, family, overrides, arguments of `grpo`, options of `serve`, a part of the error
NOT_RUN = [
    (amx, "qwen2", {}, FLOAT32, "--dtype float32", BFLOAT16.format("float32")),
    (amx, "qwen2", {"dtype": torch.float16}, "--dtype float16", "", BFLOAT16.format("float16")),
    (amx, "olmo2", {}, "", "", BACKEND),
    (amx, "qwen2", {}, "--vllm_model_impl transformers", "--model-impl=transformers", BACKEND),
    (amx, "glm4_moe", {}, "", "", ROUTING),
    (amx, "qwen3_moe", {"moe_intermediate_size": 80}, "", "", SIZES),
    (amx, "gpt_oss", {}, "", "", GPT_OSS),
    (amx, "gpt_oss", {}, IN_16_BITS, f"--ignore {SIXTEEN_BIT_EXPERTS[1]}", GPT_OSS),
    (amx, "gpt_oss", {}, "--rollout_quantization none", "--scheme none", GPT_OSS),
    (amx, "mixtral", {}, f"{ADAPTER} {IN_16_BITS}", "--enable-lora", NO_ADAPTER),
    (ampere, "qwen2", {}, "--rollout_quantization fp8", "--scheme fp8", CAPABILITY),
    (any_hardware, "mamba", {}, "", "", "MambaForCausalLM"),
    (any_hardware, "lfm2", {"layer_types": ["conv", "full_attention"]}, "", "", "Lfm2ForCausalLM"),
    (any_hardware, "qwen2", {"hidden_size": 64, "head_dim": 16}, "", "", "16 wide"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about vLLM's CPU build")
@pytest.mark.parametrize("case", NOT_RUN)
def test_what_engines_cannot_run(case, train, tmp_path_factory, monkeypatch, capfd):
    hardware, family, overrides, arguments, options, error = case
    hardware(monkeypatch)
    monkeypatch.setattr("os.execve", lambda *arguments: pytest.fail("a server was started"))
    model = tiny_model(family, **MIXTURES.get(family, {}) | overrides)
    path = save_tiny(tmp_path_factory.mktemp("model"), CHAT_TEMPLATE, model=model)
    if error not in SERVED_ONLY:
        assert error in train("--model_name_or_path", path, *arguments.split())
    assert cli.main(["serve", str(path), *options.split()]) == 2
    assert error in capfd.readouterr().err


def test_recurrent_layers_that_syncs_update_are_accepted():
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5ForCausalLM.config_class(num_hidden_layers=2))
    check_recurrent_layers(model)


# The checkpoint directory
# --------------------------------------------------------------------------------------------


def test_no_permission(train, tmp_path):
    message = train("--rollout_checkpoint_dir", "/sys/here")  # where nobody may write
    assert "/sys/here" in message
    assert "set rollout_checkpoint_dir" in message


@pytest.mark.parametrize(
    ("way", "checkpoints"),
    [
        ("stream", 1),  # that the engine starts from
        ("adapter --use_peft --lora_target_modules all-linear", 1),  # the base
        ("checkpoint", 2),  # one is written while the engine may still read the other
    ],
)
def test_room_is_needed_for_the_checkpoints_of_one_moment(way, checkpoints, train, monkeypatch):
    weights = stream_of(tiny_model(), SCHEMES["int8"]).nbytes()
    usage = shutil.disk_usage("/")._replace(free=checkpoints * weights - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = train("--rollout_quantization", "int8", "--weight_sync", *way.split())
    needed = re.search(r"(\S+) GB are needed", message)
    assert float(needed[1]) * 1e9 == pytest.approx(checkpoints * weights, rel=5e-3)


# The server
# --------------------------------------------------------------------------------------------------


def test_no_server(train):
    port = free_port()
    server = f"--vllm_server_host 127.0.0.1 --vllm_server_port {port} --vllm_server_timeout 1"
    message = train("--vllm_mode", "server", *server.split())
    expected = f"http://127.0.0.1:{port} after 1 .*`trl-qurl serve.* vllm_server_base_url"
    assert re.search(expected, message)


RANK_9 = "--use_peft --lora_r 9 --lora_target_modules all-linear"
NONE = "accepts no adapters, but this one has rank 9"
UP_TO_8 = "adapters up to rank 8, but this one has rank 9"
START = "`trl-qurl serve MODEL --scheme w4a16 --enable-lora --max-lora-rank 16`"
RESTART = "Restart it with `trl-qurl serve MODEL --scheme w4a16`"
WITHOUT = "start it without --enable-lora"
FIRST = "first model.layers.0.mlp.down_proj.weight_scale (w4a16, shape [128, 1] here and "
FORMAT = f"{FIRST}w8a16, shape [128, 1] there)"
CACHE = ["--kv-cache-dtype", "'int8_per_token_head'"]
FILES = "--weight_sync checkpoint"
# the server's format, cache and rank, arguments of `grpo`, parts of the error
OTHER_SERVERS = {
    "unquantized": (None, "auto", 0, "", [f"{FIRST}none there)", RESTART]),
    "packed in another width": ("w8a16", "auto", 0, "", [FORMAT, RESTART]),
    "cache": ("w4a16", "int8_per_token_head", 0, "", CACHE),
    "no adapters": ("w4a16", "auto", 0, f"{RANK_9} --weight_sync adapter", [NONE, START]),
    "rank": ("w4a16", "auto", 8, f"{RANK_9} --weight_sync adapter", [UP_TO_8, START]),
    "rank, merged": ("w4a16", "auto", 8, RANK_9, [UP_TO_8, WITHOUT]),
    "checkpoint": ("w4a16", "auto", 16, f"{RANK_9} {FILES}", ["weight_sync='checkpoint'", WITHOUT]),
    "policy without an adapter": ("w4a16", "auto", 16, "", ["peft_config", WITHOUT]),
}


@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_server_that_was_started_for_another_run(name, train, tmp_path_factory, monkeypatch):
    scheme, cache, rank, arguments, parts = OTHER_SERVERS[name]
    checkpoint = None
    if scheme is not None:
        checkpoint = tmp_path_factory.mktemp("started") / "model"
        write_checkpoint(tiny_model(), None, scheme, checkpoint)
    server = FakeServer(checkpoint, rank)
    server.vllm_config.cache_config.cache_dtype = cache
    monkeypatch.setattr(QuantizedVLLMGeneration, "_engine_class", server.client_class())
    connection = f"--vllm_mode server --vllm_server_base_url {URL} --rollout_quantization w4a16"
    message = train(*connection.split(), *arguments.split())
    assert all(part in message for part in parts), message


def test_server_on_another_base(tmp_path):
    write_checkpoint(tiny_model(), None, "int8", tmp_path)
    client = FakeServer(tmp_path).client()
    sent = dict(client.call_workers("digest_rollout_base")[0])
    client.check_base(sent)
    with pytest.raises(
        SyncError, match=f"{URL} has a different base .* 1 different .first model.norm"
    ):
        client.check_base(sent | {"model.norm.weight": "another"})


@pytest.mark.parametrize("error", [("not found", 404), ("Method 'x' is not implemented.", 500)])
def test_server_that_cannot_load_weights(error):
    """Without vLLM's development endpoints, or without our workers."""
    server = FakeServer()

    def before_answer(asked):
        if asked == "describe_rollouts":
            raise ServerError(*error)

    server.before_answer = before_answer
    with pytest.raises(ValueError, match=f"{URL} .*`trl-qurl serve MODEL"):
        server.client().init_communicator("cpu")


NCCL = {"backend": "nccl"}


@pytest.mark.parametrize(
    ("transfer", "server_gpu", "obstacle"),
    [
        (NCCL, "GPU-2", ""),
        (NCCL, None, ""),
        (NCCL, "GPU-1", "the trainer's GPU"),
        (None, "GPU-2", "--weight-transfer-config"),
    ],
)
def test_why_weights_are_not_streamed(transfer, server_gpu, obstacle, monkeypatch):
    monkeypatch.setattr(wire, "gpu_uuid", lambda: server_gpu and "GPU-1")
    monkeypatch.setattr(worker, "gpu_uuid", lambda: server_gpu)
    server = FakeServer()
    server.config["weight_transfer_config"] = transfer
    client = server.client()
    client.init_communicator()
    found = client.stream_obstacle or ""
    assert obstacle in found
    assert bool(obstacle) == bool(found)
    assert "/server_info" not in server.asked, "it takes vLLM seconds"
