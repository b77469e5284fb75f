"""Mistakes of users: each gets one sentence that says what to do, before an engine starts, and
leaves no files.
"""

import re
import shutil
import sys

import pytest
import torch
import yaml
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


QUESTION = '{"question": "1 + 1?", "answer": "2"}\n'


@pytest.fixture
def train(model, tmp_path, monkeypatch, capfd):
    """Run `trl-qurl grpo` with a mistake, and return its error, which is the only one, comes before
    an engine starts, and leaves no files.
    """
    questions = tmp_path / "questions.jsonl"
    questions.write_text(QUESTION * 32)
    sound = "grpo --use_cpu true --bf16 false --report_to none --max_completion_length 64"
    sound += f" --model_name_or_path {model} --dataset {questions}"
    sound += f" --output_dir {tmp_path / 'out'} --rollout_checkpoint_dir {tmp_path / 'rollouts'}"

    def run(*arguments):
        # In this process, because importing TRL and vLLM takes longer than the error.
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        status = cli.main([*sound.split(), *map(str, arguments)])
        printed = capfd.readouterr().err
        assert status == 2, printed[-3000:]
        assert "Traceback" not in printed, printed[-3000:]
        assert "Loading safetensors checkpoint shards" not in printed, "the engine was started"
        [error] = re.findall("^trl-qurl: error: (.+)", printed, re.MULTILINE)
        left = [*tmp_path.rglob("*.safetensors"), *tmp_path.glob("rollouts/*")]
        assert not left, f"something half-written was left: {left}"
        return error

    return run


# Parts that are not installed
# ----------------------------------------------------------------------------------------


# TRL imports vLLM for a server, too
MISSING = """\
llmcompressor => --weight_sync llmcompressor => trl-qurl[llmcompressor]
math_verify => => trl-qurl[math]
vllm => --vllm_mode server => trl-qurl[vllm]"""


@pytest.mark.parametrize("case", MISSING.splitlines())
def test_another_package_missing(case, train, model, monkeypatch, capfd):
    package, arguments, advice = case.split(" =>")
    monkeypatch.setitem(sys.modules, package, None)
    said = f"pip install '{advice.strip()}'"
    assert said in train(*arguments.split())
    if package == "vllm":
        assert cli.main(["serve", str(model)]) == 2
        assert said in capfd.readouterr().err


# Settings
# --------------------------------------------------------------------------------------------------


def test_an_error_of_transformers_is_one_line(train):
    assert "--report_to wandbb" in train("--report_to", "wandbb")


def test_questions_that_do_not_fill_a_rollout(train, tmp_path):
    (tmp_path / "few.jsonl").write_text(QUESTION * 31)
    message = train("--dataset", tmp_path / "few.jsonl")
    assert re.search("31 prompts.* needs 32: per_device_train_batch_size=16", message)


def test_tokenizer_without_a_chat_template(train, tmp_path):
    base = save_tiny(tmp_path / "base")
    (base / "model.safetensors").unlink()
    message = train("--model_name_or_path", base)
    for part in (str(base), "Instruct", "chat_template"):
        assert part in message


# What engines cannot run
# --------------------------------------------------------------------------------------------------


IN_16_BITS = "--quantization_ignore " + " ".join(SIXTEEN_BIT_EXPERTS)
# In a colocated engine, these experts stay in 16 bits.
SERVED_ONLY = {"routing of glm4_moe", "experts 80 wide"}
NOT_RUN = yaml.safe_load(rf"""
float32 in the engine:
  grpo: --vllm_engine_kwargs {{"dtype":"float32"}}
  serve: --dtype float32
  error: "dtype='bfloat16', not 'float32': set it in vllm_engine_kwargs"
float16 in the trainer:
  dtype: float16
  grpo: --dtype float16
  error: "dtype='bfloat16', not 'float16': set it in vllm_engine_kwargs"
an architecture that vLLM runs by transformers:
  family: olmo2
  error: &backend "transformers backend: set rollout_quantization=None"
transformers on request:
  grpo: --vllm_model_impl transformers
  serve: --model-impl=transformers
  error: *backend
routing of glm4_moe:
  family: glm4_moe
  error: "not of glm4_moe: add 're:"
experts 80 wide:
  family: qwen3_moe
  overrides: {{moe_intermediate_size: 80}}
  error: "not 128 and 80: add 're:"
gpt_oss:
  family: gpt_oss
  error: experts of gpt-oss
gpt_oss with experts in 16 bits:
  family: gpt_oss
  grpo: {IN_16_BITS}
  serve: --ignore {SIXTEEN_BIT_EXPERTS[1]}
  error: experts of gpt-oss
gpt_oss in 16 bits:
  family: gpt_oss
  grpo: --rollout_quantization none
  serve: --scheme none
  error: experts of gpt-oss
adapters of a mixture:
  family: mixtral
  grpo: >
    --use_peft --lora_target_modules q_proj v_proj --weight_sync adapter
    --smooth_activations false {IN_16_BITS}
  serve: --enable-lora
  error: weight_sync='auto', no --enable-lora
FP8 on Ampere:
  grpo: --rollout_quantization fp8
  serve: --scheme fp8
  error: compute capability 8.9
recurrent layers:
  family: mamba
  error: MambaForCausalLM
convolutions:
  family: lfm2
  overrides: {{layer_types: [conv, full_attention]}}
  error: Lfm2ForCausalLM
heads 16 wide:
  overrides: {{hidden_size: 64, head_dim: 16}}
  error: 16 wide""")


USUAL = {
    "family": "qwen2",
    "dtype": "float32",
    "overrides": {},
    "grpo": "",
    "serve": "",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about vLLM's CPU build")
@pytest.mark.parametrize("name", NOT_RUN)
def test_what_engines_cannot_run(name, train, tmp_path_factory, monkeypatch, capfd):
    case = USUAL | NOT_RUN[name]
    error = case["error"]
    if name == "FP8 on Ampere":
        monkeypatch.setattr("trl_qurl.rollout.checks.hardware.gpu_capability", lambda: (8, 0))
    else:
        cpu = {"avx2": True, "amx_tile": True}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr("os.execve", lambda *arguments: pytest.fail("a server was started"))
    overrides = MIXTURES.get(case["family"], {}) | case["overrides"]
    dtype = getattr(torch, case["dtype"])
    model = tiny_model(case["family"], dtype, **overrides)
    path = save_tiny(tmp_path_factory.mktemp("model"), CHAT_TEMPLATE, model=model)
    if name not in SERVED_ONLY:
        assert error in train("--model_name_or_path", path, *case["grpo"].split())
    assert cli.main(["serve", str(path), *case["serve"].split()]) == 2
    assert error in capfd.readouterr().err


def test_recurrent_layers_that_syncs_update_are_accepted():
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5ForCausalLM.config_class(num_hidden_layers=2))
    check_recurrent_layers(model)


# The checkpoint directory
# --------------------------------------------------------------------------------------------


def test_no_permission(train):
    message = train("--rollout_checkpoint_dir", "/sys/here")  # where nobody may write
    assert "/sys/here" in message
    assert "set rollout_checkpoint_dir" in message


# how weights are sent, and how many checkpoints are there at once
WAYS = {
    "stream": 1,  # that the engine starts from
    "adapter --use_peft --lora_target_modules all-linear": 1,  # the base
    "checkpoint": 2,  # one is written while the engine may still read the other
}


@pytest.mark.parametrize(("way", "checkpoints"), WAYS.items())
def test_room_is_needed_for_the_checkpoints_of_one_moment(way, checkpoints, train, monkeypatch):
    weights = stream_of(tiny_model(), SCHEMES["int8"]).nbytes()
    usage = shutil.disk_usage("/")._replace(free=checkpoints * weights - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = train("--rollout_quantization", "int8", "--weight_sync", *way.split())
    [gigabytes] = re.findall(r"(\S+) GB are needed", message)
    needed = checkpoints * weights / 1e9
    assert float(gigabytes) == pytest.approx(needed, rel=5e-3)


# The server
# --------------------------------------------------------------------------------------------------


def test_no_server(train):
    port = free_port()
    server = f"--vllm_server_host 127.0.0.1 --vllm_server_port {port} --vllm_server_timeout 1"
    message = train("--vllm_mode", "server", *server.split())
    expected = f"http://127.0.0.1:{port} after 1 .*`trl-qurl serve.* vllm_server_base_url"
    assert re.search(expected, message)


# the server's format, and its cache and rank if not the defaults; arguments of `grpo`; parts of
# the error
OTHER_SERVERS = yaml.safe_load("""
unquantized:
  format: null
  error:
  - first model.layers.0.mlp.down_proj.weight_scale
    (w4a16, shape [128, 1] here and none there)
  - &restart Restart it with `trl-qurl serve MODEL --scheme w4a16`
packed in another width:
  format: w8a16
  error:
  - first model.layers.0.mlp.down_proj.weight_scale
    (w4a16, shape [128, 1] here and w8a16, shape [128, 1] there)
  - *restart
cache:
  cache: int8_per_token_head
  error: [--kv-cache-dtype, "'int8_per_token_head'"]
no adapters:
  grpo: --use_peft --lora_r 9 --lora_target_modules all-linear --weight_sync adapter
  error:
  - accepts no adapters, but this one has rank 9
  - &start "`trl-qurl serve MODEL --scheme w4a16 --enable-lora --max-lora-rank 16`"
rank:
  rank: 8
  grpo: --use_peft --lora_r 9 --lora_target_modules all-linear --weight_sync adapter
  error: [&rank "adapters up to rank 8, but this one has rank 9", *start]
rank, merged:
  rank: 8
  grpo: --use_peft --lora_r 9 --lora_target_modules all-linear
  error: [*rank, &without start it without --enable-lora]
checkpoint:
  rank: 16
  grpo: --use_peft --lora_r 9 --lora_target_modules all-linear --weight_sync checkpoint
  error: [weight_sync='checkpoint', *without]
policy without an adapter:
  rank: 16
  error: [peft_config, *without]""")


@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_server_that_was_started_for_another_run(name, train, tmp_path_factory, monkeypatch):
    case = {
        "format": "w4a16",
        "cache": "auto",
        "rank": 0,
        "grpo": "",
        **OTHER_SERVERS[name],
    }
    checkpoint = None
    if case["format"] is not None:
        checkpoint = tmp_path_factory.mktemp("started") / "model"
        write_checkpoint(tiny_model(), None, case["format"], checkpoint)
    server = FakeServer(checkpoint, case["rank"])
    server.vllm_config.cache_config.cache_dtype = case["cache"]
    monkeypatch.setattr(QuantizedVLLMGeneration, "_engine_class", server.client_class())
    connection = f"--vllm_mode server --vllm_server_base_url {URL} --rollout_quantization w4a16"
    message = train(*connection.split(), *case["grpo"].split())
    for part in case["error"]:
        assert part in message


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


STREAMS = yaml.safe_load("""
- [nccl, GPU-2, null]
- [nccl, null, null]
- [nccl, GPU-1, the trainer's GPU]
- [null, GPU-2, --weight-transfer-config]""")


@pytest.mark.parametrize(("backend", "server_gpu", "obstacle"), STREAMS)
def test_why_weights_are_not_streamed(backend, server_gpu, obstacle, monkeypatch):
    monkeypatch.setattr(wire, "gpu_uuid", lambda: server_gpu and "GPU-1")
    monkeypatch.setattr(worker, "gpu_uuid", lambda: server_gpu)
    server = FakeServer()
    server.config["weight_transfer_config"] = backend and {"backend": backend}
    client = server.client()
    client.init_communicator()
    if obstacle:
        assert obstacle in client.stream_obstacle
    else:
        assert not client.stream_obstacle
    assert "/server_info" not in server.asked, "it takes vLLM seconds"
