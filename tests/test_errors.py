"""Mistakes of users: each gets one sentence that says what to do, before an engine starts, and
leaves no files.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
import torch
from conftest import child_environment, free_port
from support.disks import mounted
from support.servers import JSONHandler, serving
from tiny import CHAT_TEMPLATE, MIXTURES, SIXTEEN_BIT_EXPERTS, save_tiny, stream_of, tiny_model
from transformers import (
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3NextForCausalLM,
)

from trl_qurl import cli
from trl_qurl.quantization import SCHEMES
from trl_qurl.quantization.layers import check_recurrent_layers
from trl_qurl.quantization.plan import fingerprint
from trl_qurl.rollout.engine.colocated import prepare_process
from trl_qurl.rollout.engine.served import ServedEngine
from trl_qurl.rollout.errors import ServerError, SyncError
from trl_qurl.rollout.routes import stream_metadata
from trl_qurl.rollout.wire import WORKER_EXTENSION, WeightUpdate

# Put on PYTHONPATH, this hides a package from a new process as if it were not installed.
HIDE = """
import importlib.util, sys
find_spec = importlib.util.find_spec
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
importlib.util.find_spec = lambda name, package=None: None if name == "vllm" else find_spec(name, package)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), CHAT_TEMPLATE)


@pytest.fixture
def plain(model, tmp_path):
    """A command without mistakes."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text((json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n") * 32)
    plain = [
        "grpo",
        "--use_cpu",
        "true",
        "--bf16",
        "false",
        "--report_to",
        "none",
        "--max_completion_length",
        "64",
    ]
    plain += [
        "--model_name_or_path",
        str(model),
        "--dataset",
        str(questions),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    return [*plain, "--rollout_checkpoint_dir", str(tmp_path / "rollouts")]


@pytest.fixture
def train(plain, tmp_path, monkeypatch, capfd):
    """Run `trl-qurl grpo` with a mistake, and return the error that it prints."""

    def run(*arguments):
        # In this process, because importing TRL and vLLM takes longer than the error.
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        status = cli.main([*plain, *map(str, arguments)])
        return printed_error(status, *capfd.readouterr(), scratch=tmp_path)

    return run


RUN = """
import json, sys
from trl_qurl import cli
for command in json.loads(sys.argv[1]):
    print("STATUS", cli.main(command), file=sys.stderr)
"""


def errors_without_vllm(*commands, scratch):
    """Errors of `trl-qurl` for each of these commands in a process that does not find vLLM."""
    (scratch / "hide").mkdir()
    (scratch / "hide" / "sitecustomize.py").write_text(HIDE)
    # this checkout's package
    path = os.pathsep.join([str(scratch / "hide"), str(Path(__file__).parents[1])])
    environment = child_environment(PYTHONPATH=path)
    start = [
        sys.executable,
        "-c",
        RUN,
        json.dumps([list(map(str, command)) for command in commands]),
    ]
    done = subprocess.run(
        start, env=environment, cwd=scratch, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *printed, _ = re.split(r"^STATUS (\d)\n", done.stderr, flags=re.MULTILINE)
    pairs = zip(printed[::2], printed[1::2], strict=True)
    return [printed_error(int(status), "", err, scratch) for err, status in pairs]


def printed_error(status, out, err, scratch):
    """The line with the error, checked to be the only one, before an engine starts and without
    files left over.
    """
    assert status == 2, err[-3000:]
    assert "Traceback" not in err
    assert "Loading safetensors checkpoint shards" not in err, "the engine was started first"
    errors = [line for line in err.splitlines() if line.startswith("trl-qurl: error: ")]
    assert len(errors) == 1, err[-3000:]
    rollouts = scratch / "rollouts"
    left = [*scratch.rglob("*.safetensors"), *(rollouts.iterdir() if rollouts.exists() else ())]
    assert not left, f"something half-written was left: {left}"
    return errors[0].removeprefix("trl-qurl: error: ")


# Parts that are not installed
# ----------------------------------------------------------------------------------------


def test_vllm_missing(plain, tmp_path):
    alone, served = errors_without_vllm(plain, [*plain, "--vllm_mode", "server"], scratch=tmp_path)
    assert alone.startswith(
        "Quantized rollouts need vLLM, which is not installed: run `pip install 'trl-qurl[vllm]'`"
    )
    assert served == alone and "(TRL imports it here even if a server generates)" in served


def test_llmcompressor_missing(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    message = train("--weight_sync", "llmcompressor")
    assert "run `pip install 'trl-qurl[llmcompressor]'`, or use weight_sync='auto'" in message


def test_math_verify_missing(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert train() == "Grading answers needs math_verify: run `pip install 'trl-qurl[math]'`."


# Settings
# --------------------------------------------------------------------------------------------------


def test_tokenizer_without_a_chat_template(train, tmp_path):
    base = save_tiny(tmp_path / "base")
    (base / "model.safetensors").unlink()
    message = train("--model_name_or_path", base)
    assert message.startswith(f"The tokenizer of {base} has no chat template")
    assert (
        "use the Instruct variant of the model, or set a chat_template on its tokenizer and save "
        "both" in message
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="only vLLM's CPU build has so few head sizes")
def test_heads_that_the_engine_has_no_kernel_for(train, tmp_path_factory):
    model = save_tiny(tmp_path_factory.mktemp("narrow"), CHAT_TEMPLATE, hidden_size=64, head_dim=16)
    assert train("--model_name_or_path", model).startswith(
        "The attention heads of this model are 16 wide, but vLLM's CPU build has kernels only for "
        "32,"
    )


IN_16_BITS = "--quantization_ignore " + " ".join(SIXTEEN_BIT_EXPERTS)
ADAPTER = (
    "--use_peft --lora_target_modules q_proj v_proj --weight_sync adapter --smooth_activations "
    "false"
)
BFLOAT16 = "CPUs with AMX need dtype='bfloat16', not '{}': set it in vllm_engine_kwargs"
BACKEND = "CPUs with AMX cannot run its transformers backend: set rollout_quantization=None"
GPT_OSS = "No sync can load the experts of gpt-oss"
NO_ADAPTER = (
    "vLLM's CPU build runs no adapter beside experts: merge it (weight_sync='auto', no "
    "--enable-lora)"
)
ROUTING = "INT8 experts only of mixtral, olmoe, qwen2_moe, qwen3_moe, not of glm4_moe: add 're:"
SIZES = "INT8 experts only with multiples of 32 as sizes, not 128 and 80: add 're:"
# family, overrides, arguments of `grpo`, options of `serve`, the error
CPU_REFUSALS = [
    (
        "qwen2",
        {},
        '--vllm_engine_kwargs {"dtype":"float32"}',
        "--dtype float32",
        BFLOAT16.format("float32"),
    ),
    ("qwen2", {"dtype": torch.float16}, "--dtype float16", "", BFLOAT16.format("float16")),
    ("olmo2", {}, "", "", BACKEND),
    ("qwen2", {}, "--vllm_model_impl transformers", "--model-impl=transformers", BACKEND),
    ("glm4_moe", {}, "", "", ROUTING),
    ("qwen3_moe", {"moe_intermediate_size": 80}, "", "", SIZES),
    ("gpt_oss", {}, "", "", GPT_OSS),
    ("gpt_oss", {}, IN_16_BITS, f"--ignore {SIXTEEN_BIT_EXPERTS[1]}", GPT_OSS),
    ("gpt_oss", {}, "--rollout_quantization none", "--scheme none", GPT_OSS),
    ("mixtral", {}, f"{ADAPTER} {IN_16_BITS}", "--enable-lora", NO_ADAPTER),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about vLLM's CPU build")
@pytest.mark.parametrize(("family", "overrides", "arguments", "options", "error"), CPU_REFUSALS)
def test_what_cpus_with_amx_cannot_run(
    family, overrides, arguments, options, error, train, tmp_path_factory, monkeypatch, capfd
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_tile": True})
    monkeypatch.setattr("os.execve", lambda *arguments: pytest.fail("a server was started"))
    model = tiny_model(family, **MIXTURES.get(family, {}) | overrides)
    path = save_tiny(tmp_path_factory.mktemp("model"), CHAT_TEMPLATE, model=model)
    if error not in (ROUTING, SIZES):  # in a colocated engine, experts stay in 16 bits
        message = train("--model_name_or_path", path, *arguments.split())
        assert error in message and message.endswith(", or use a GPU.")
    assert cli.main(["serve", str(path), *options.split()]) == 2
    assert error in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="about vLLM's CPU build")
@pytest.mark.parametrize(("family", "is_refused"), [("olmo2", True), ("llama", False)])
def test_architecture_of_a_model_from_memory_is_its_class(family, is_refused, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_tile": True})
    model = tiny_model(family)
    assert model.config.architectures is None
    with (
        pytest.raises(ValueError, match="its transformers backend") if is_refused else nullcontext()
    ):
        prepare_process(model, stream_of(model, SCHEMES["int8"]), {"model_impl": "auto"}, 2)


def test_a_format_that_the_gpu_has_no_kernel_for(train, model, monkeypatch, capfd):
    monkeypatch.setattr("trl_qurl.rollout.engine.hardware.gpu_capability", lambda: (8, 0))
    sentence = (
        "FP8 rollouts need a GPU of compute capability 8.9 or higher: choose another "
        "rollout_quantization"
    )
    assert train("--rollout_quantization", "fp8").startswith(sentence)
    assert cli.main(["serve", str(model), "--scheme", "fp8"]) == 2
    assert sentence in capfd.readouterr().err


def test_recurrent_layers(train, tmp_path_factory, capfd):
    size = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    mamba = MambaForCausalLM(MambaConfig(**size, pad_token_id=0, eos_token_id=1))
    model = save_tiny(tmp_path_factory.mktemp("mamba"), CHAT_TEMPLATE, model=mamba)
    sentence = (
        "MambaForCausalLM has recurrent layers (Mamba, linear attention, convolutions), and no "
        "sync is known"
    )
    assert train("--model_name_or_path", model).startswith(sentence)
    assert cli.main(["serve", str(model)]) == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        (MambaForCausalLM, True),
        (FalconH1ForCausalLM, True),
        (Qwen3NextForCausalLM, True),
        (Lfm2ForCausalLM, True),
        (Qwen3_5ForCausalLM, False),  # the engine that a sync left was the equal of a fresh one
        (Gemma3ForCausalLM, False),  # sliding windows are attention
    ],
)
def test_which_models_have_recurrent_layers(kind, refused):
    kinds = {"layer_types": ["conv", "full_attention"]} if kind is Lfm2ForCausalLM else {}
    with torch.device("meta"):
        model = kind(kind.config_class(num_hidden_layers=2, **kinds))
    with (
        pytest.raises(ValueError, match=f"{kind.__name__} has recurrent")
        if refused
        else nullcontext()
    ):
        check_recurrent_layers(model)


# Questions
# --------------------------------------------------------------------------------------------------


def test_questions_without_answers(train, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "1 + 1?", "result": "2"}\n')
    message = train("--dataset", tmp_path / "bad.jsonl")
    assert "bad.jsonl has no column answer or " in message and "only question, result" in message
    assert "--answer_column NAME" in message


def test_questions_that_do_not_fill_a_rollout(train, tmp_path):
    (tmp_path / "few.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 31)
    message = train("--dataset", tmp_path / "few.jsonl")
    assert message.startswith(
        "train_dataset has 31 prompts, but a rollout needs 32 (per_device_train_batch_size x"
    )


def test_a_tracker_that_is_not_installed(train):
    message = train("--report_to", "wandbb")
    assert message.startswith(
        "--report_to wandbb is unknown or not installed: install its package, or use "
    )


# The checkpoint directory
# --------------------------------------------------------------------------------------------


WAY_OUT = "set rollout_checkpoint_dir to a writable directory with enough space."


def test_no_permission(train, tmp_path):
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        message = train("--rollout_checkpoint_dir", tmp_path / "locked" / "here")
        assert "(Permission denied)" in message
    else:  # whom permissions do not stop
        with mounted(tmp_path / "locked", "ro") as locked:
            message = train("--rollout_checkpoint_dir", locked / "here")
        assert "(Read-only file system)" in message
    assert "No room for the rollout engine's checkpoint in" in message and message.endswith(WAY_OUT)


def test_no_space(train, tmp_path):
    with mounted(tmp_path / "small", "size=64k") as small:
        message = train("--rollout_checkpoint_dir", small)
        assert not list(small.iterdir())
    assert "are free and" in message and message.endswith(WAY_OUT)


LORA = ("--use_peft", "--lora_target_modules", "all-linear")


@pytest.mark.parametrize(
    ("way", "checkpoints"),
    [
        (("stream",), 1),  # that the engine starts from
        (("adapter", *LORA), 1),  # the base
        (("checkpoint",), 2),  # one is written while the engine may still read the other
    ],
    ids=["stream", "adapter", "checkpoint"],
)
def test_room_is_needed_for_the_checkpoints_of_one_moment(way, checkpoints, train, monkeypatch):
    weights = stream_of(tiny_model(), SCHEMES["int8"]).nbytes()
    usage = shutil.disk_usage("/")._replace(free=checkpoints * weights - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = train("--rollout_quantization", "int8", "--weight_sync", *way)
    needed = re.search(r"are free and (\S+) GB are needed", message)
    assert float(needed[1]) * 1e9 == pytest.approx(checkpoints * weights, rel=5e-3)


# The server
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["vllm_server_base_url", "vllm_server_port"])
def test_no_server(setting, train):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    named = {
        "vllm_server_base_url": ("--vllm_server_base_url", url),
        "vllm_server_port": ("--vllm_server_host", "127.0.0.1", "--vllm_server_port", str(port)),
    }
    message = train("--vllm_mode", "server", *named[setting], "--vllm_server_timeout", "1")
    assert message.startswith(
        f"No vLLM server answers at {url} after 1 seconds. Start one with `trl-qurl serve"
    )
    assert message.endswith("or correct vllm_server_base_url.")


@contextmanager
def answering(
    config, workers=None, statuses=None, asked=None, silent=None, started=None, answers=None
):
    """The address of a stub that says about itself what a vLLM server would, which takes half a
    minute to start.

    Args:
        config: vLLM's, or `None` for a server without development endpoints.
        workers: What its workers report.
        statuses: By path, what it responds with instead.
        asked: Gets every path of a request.
        silent: A path that is never answered.
        started: The fingerprint of the checkpoint that it started from.
        answers: By path, other answers.
    """
    is_ours = bool(config) and config["parallel_config"]["worker_extension_cls"] == WORKER_EXTENSION
    released = threading.Event()
    known = {
        "/health": {},
        "/v1/models": {"data": [{"id": "model"}]},
        "/version": {"version": "0.31.0"},
    }
    known |= {
        "/server_info": config and {"vllm_config": config},
        "/collective_rpc": {"results": [workers]},
    }
    # an empty body, as vLLM's
    known |= {"/reset_prefix_cache": {"success": True}, "/reset_encoder_cache": ""}
    known |= answers or {}

    class Handler(JSONHandler):
        def respond(self, path, body):
            if asked is not None:
                asked.append(path)
            if path == silent:
                released.wait(20.0)  # then hang up: a client without a limit fails this test
                self.close_connection = True
                return
            answer, missing = known.get(path), 404
            if b'"describe_config"' in body:  # which workers without our extension do not know
                answer, missing = {"results": [config]} if is_ours else None, 500 if config else 404
            elif b'"starting_fingerprint"' in body:
                answer = {"results": [started or {}]}
            self.send((statuses or {}).get(path, missing if answer is None else 200), answer)

    with serving(Handler) as url:
        yield url
        released.set()


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_quantized_server_for_an_unquantized_run(train, int8_server):
    message = train(
        "--vllm_mode",
        "server",
        "--vllm_server_base_url",
        int8_server.url,
        "--rollout_quantization",
        "none",
    )
    assert (
        "as rollout_quantization=None sends it: other formats, layers or another model: " in message
    )
    assert (
        "first model.layers.0.mlp.down_proj.weight_scale (none here and int8, shape [128, 1] there)"
        in message
    )
    assert "Restart it with `trl-qurl serve MODEL --scheme none`" in message


DESCRIPTION = {"max_model_len": 64, "dtype": None}
DESCRIPTION |= {"kv_cache_dtype": "auto", "max_lora_rank": 0}
WITHOUT_NCCL = {
    "parallel_config": {"worker_extension_cls": WORKER_EXTENSION},
    "weight_transfer_config": None,
}
WITH_NCCL = WITHOUT_NCCL | {"weight_transfer_config": {"backend": "nccl"}}

RANK_9 = "--use_peft --lora_r 9 --lora_target_modules all-linear"
NONE = "the server accepts no adapters, but this one has rank 9"
UP_TO_8 = "adapters up to rank 8, but this one has rank 9"
START = "start it with `trl-qurl serve MODEL --scheme w4a16 --enable-lora --max-lora-rank 16`"
WHOLE = "The server accepts adapters (--enable-lora), but this run would send whole weights"
WITHOUT = "start it without --enable-lora"
# the server's format, what it says, arguments of `grpo`, parts of the error
OTHER_SERVERS = {
    "unquantized": (
        *(
            None,
            {},
            "",
            "as rollout_quantization='w4a16' sends it: other formats, layers or another model: ",
        ),
        "first model.layers.0.mlp.down_proj.weight_scale (w4a16, shape [128, 1] here and none "
        "there)",
        "Restart it with `trl-qurl serve MODEL --scheme w4a16`",
    ),
    "packed in another width": (
        *("w8a16", {}, "", "(w4a16, shape [128, 1] here and w8a16, shape [128, 1] there). Restart"),
    ),
    "cache": (
        *(
            "w4a16",
            {"kv_cache_dtype": "int8_per_token_head"},
            "",
            "--kv-cache-dtype of the vLLM server at",
        ),
        "is 'int8_per_token_head', a format of the key-value cache",
    ),
    "no adapters": ("w4a16", {}, f"{RANK_9} --weight_sync adapter", NONE, START),
    "no adapters, rounded": ("w4a16", {}, f"{RANK_9} --round_base true", NONE, START),
    "rank": ("w4a16", {"max_lora_rank": 8}, f"{RANK_9} --weight_sync adapter", UP_TO_8, START),
    "rank, merged": ("w4a16", {"max_lora_rank": 8}, RANK_9, WHOLE, UP_TO_8, WITHOUT),
    "checkpoint": (
        *("w4a16", {"max_lora_rank": 16}, f"{RANK_9} --weight_sync checkpoint", WHOLE),
        *("(weight_sync='checkpoint')", WITHOUT),
    ),
    "policy without an adapter": (
        *("w4a16", {"max_lora_rank": 16}, "", WHOLE),
        *("(the policy has no adapter (peft_config))", WITHOUT),
    ),
}


def shapes_of(weights):
    return {name: shape for name, _, shape in stream_metadata(weights)}


@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_server_that_was_started_for_another_run(name, train):
    served, described, arguments, *parts = OTHER_SERVERS[name]
    weights = stream_of(tiny_model(), served)
    started = fingerprint(weights.plan.schemes, shapes_of(weights))
    with answering(WITHOUT_NCCL, DESCRIPTION | described, started=started) as url:
        connection = [
            "--vllm_mode",
            "server",
            "--vllm_server_base_url",
            url,
            "--rollout_quantization",
            "w4a16",
        ]
        message = train(*connection, *arguments.split())
    assert all(part in message for part in parts), message


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_server_that_keeps_other_layers_in_16_bits(train, int8_server):
    # As many patterns as the server's, for other layers; then another pattern for the same layers.
    server = ("--vllm_mode", "server", "--vllm_server_base_url", int8_server.url)
    message = train(*server, "--quantization_ignore", "re:.*(lm_head|layers.1.*down_proj)")
    first = (
        "first model.layers.1.mlp.down_proj.weight_scale (none here and int8, shape [128, 1] there)"
    )
    assert f"2 tensors differ, {first}. Restart it with `trl-qurl" in message
    weights = stream_of(tiny_model(), SCHEMES["int8"], ["re:.*head"])
    ServedEngine(
        base_url=int8_server.url, plan=weights.plan, shapes=shapes_of(weights)
    ).init_communicator("cpu")


def test_server_on_another_base():
    with answering(None, {"a": "1", "b": "2"}) as url:
        client = ServedEngine(base_url=url)
        client.check_base({"a": "1", "b": "2"})
        message = f"server at {url} has a different base .*: of 2 tensors, 1 different .first b"
        with pytest.raises(SyncError, match=message):
            client.check_base({"a": "1", "b": "3"})


@pytest.mark.parametrize(
    "config",
    [{"parallel_config": {"worker_extension_cls": ""}}, None],
    ids=["no worker extension", "no development endpoints"],
)
def test_server_that_cannot_load_weights(config):
    with answering(config) as url:
        client = ServedEngine(base_url=url)
        with pytest.raises(
            ValueError,
            match=f"{url} cannot load weights: .*. Restart it with `trl-qurl serve MODEL",
        ):
            client.init_communicator("cpu")


@pytest.mark.parametrize("path", ["/v1/models", "/collective_rpc"])
def test_server_that_accepts_and_never_answers(path, train):
    asked = []
    with answering(None, asked=asked, silent=path) as url:
        message = train(
            "--vllm_mode", "server", "--vllm_server_base_url", url, "--vllm_request_timeout", "1"
        )
    assert (
        f"{url} did not answer {path} within 1 seconds: it hangs, or needs a larger "
        "vllm_request_timeout" in message
    )
    assert asked.count(path) == 1, "a request that timed out was repeated"


def test_requests_of_trl_itself_are_bounded_too():
    path, image = "/v1/chat/completions/render", SimpleNamespace(save=lambda *args, **kwargs: None)
    with answering(None, silent=path) as url, pytest.raises((requests.Timeout, ServerError)):
        ServedEngine(base_url=url, request_timeout=1.0).image_features([[image]])


def test_only_our_client_waits_for_the_server():
    asked = []
    with answering(None, asked=asked) as url:
        ServedEngine(base_url=url)
    assert asked.count("/health") == 1, "TRL's client asks too, and without a limit"


def test_server_that_wants_a_key():
    with answering(None, statuses={"/collective_rpc": 401}) as url:
        client = ServedEngine(base_url=url)
        with pytest.raises(
            ServerError, match=f"{url} requires an API key: set VLLM_API_KEY for the trainer"
        ):
            client.version()


@pytest.mark.parametrize(
    ("config", "obstacle"),
    [(WITH_NCCL, None), (WITHOUT_NCCL, "the server was started without --weight-transfer-config")],
    ids=["NCCL", "no NCCL"],
)
def test_server_with_nccl_is_recognized(config, obstacle):
    asked = []
    with answering(config, DESCRIPTION, asked=asked) as url:
        client = ServedEngine(base_url=url)
        client.init_communicator()
        assert client.stream_obstacle == obstacle
    assert "/server_info" not in asked, "it takes vLLM seconds"


def test_server_that_reports_no_cache_format():
    with answering(None, {}) as url:
        ServedEngine(base_url=url).load_checkpoint(Path("nowhere"), WeightUpdate("v1"))


def test_requests_stop_after_one_has_failed():
    asked, error = [], {"error": {"message": "EngineDeadError: look at the log"}}
    failing = {"statuses": {"/v1/completions": 500}, "answers": {"/v1/completions": error}}
    with answering(None, asked=asked, **failing) as url:
        client = ServedEngine(base_url=url)
        with pytest.raises(
            ServerError, match="answered /v1/completions with HTTP 500: check the .*EngineDeadError"
        ):
            client.generate([[1, 2]] * 500)
    assert asked.count("/v1/completions") <= 64


def test_requests_after_a_failure_repeat_its_error():
    # The rest of a rollout, hundreds of requests, is queued behind the one that failed.
    asked = []
    with answering(None, DESCRIPTION, statuses={"/get_world_size": 500}, asked=asked) as url:
        client = ServedEngine(base_url=url)
        assert client.describe()._asdict() == DESCRIPTION
        with pytest.raises(ServerError, match="answered /get_world_size with HTTP 500") as first:
            client.get_world_size()
        asked.clear()
        with pytest.raises(ServerError) as second:
            client.describe()
    assert second.value is first.value and not asked
