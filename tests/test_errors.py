"""Mistakes as a user meets them: one sentence says what to do, before the engine starts; nothing is left behind."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import requests
import torch
from conftest import child_environment, free_port
from tiny import SIXTEEN_BIT_EXPERTS, stream_of, tiny_mixture, tiny_model, tiny_tokenizer
from transformers import (
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    JambaForCausalLM,
    Lfm2ForCausalLM,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NemotronHForCausalLM,
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
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def plain(model, tmp_path):
    """A command that trains, and with which nothing is wrong."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text((json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n") * 32)
    plain = ["grpo", "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    plain += ["--model_name_or_path", str(model), "--dataset", str(questions), "--output_dir", str(tmp_path / "out")]
    return [*plain, "--rollout_checkpoint_dir", str(tmp_path / "rollouts")]


@pytest.fixture
def train(plain, tmp_path, monkeypatch, capfd):
    """Run `trl-qurl grpo` with what is wrong, and return the error that it prints."""

    def run(*arguments):
        # In this process, which has TRL and vLLM already: importing them takes longer than failing does.
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
    """What `trl-qurl` prints for each of these commands in a process that does not find vLLM."""
    (scratch / "hide").mkdir()
    (scratch / "hide" / "sitecustomize.py").write_text(HIDE)
    places = os.pathsep.join([str(scratch / "hide"), str(Path(__file__).parents[1])])  # this checkout's package
    environment = child_environment(PYTHONPATH=places)
    start = [sys.executable, "-c", RUN, json.dumps([list(map(str, command)) for command in commands])]
    done = subprocess.run(start, env=environment, cwd=scratch, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    *printed, _ = re.split(r"^STATUS (\d)\n", done.stderr, flags=re.MULTILINE)
    pairs = zip(printed[::2], printed[1::2], strict=True)
    return [printed_error(int(status), "", err, scratch) for err, status in pairs]


def printed_error(status, out, err, scratch):
    """The one line that says what is wrong, with nothing begun and nothing left."""
    assert status == 2, err[-3000:]
    assert "Traceback" not in err
    assert "Loading safetensors checkpoint shards" not in err, "the engine was started first"
    errors = [line for line in err.splitlines() if line.startswith("trl-qurl: error: ")]
    assert len(errors) == 1, err[-3000:]
    rollouts = scratch / "rollouts"
    left = [*scratch.rglob("*.safetensors"), *(rollouts.iterdir() if rollouts.exists() else ())]
    assert not left, f"something half-written was left: {left}"
    return errors[0].removeprefix("trl-qurl: error: ")


# Parts that are not installed ----------------------------------------------------------------------------------------


def test_vllm_missing(plain, tmp_path):
    alone, served = errors_without_vllm(plain, [*plain, "--vllm_mode", "server"], scratch=tmp_path)
    assert alone.startswith("Quantized rollouts need vLLM, which is not installed: run `pip install 'trl-qurl[vllm]'`")
    assert served == alone and "(TRL imports it here even if a server generates)" in served


def test_llmcompressor_missing(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    message = train("--weight_sync", "llmcompressor")
    assert "run `pip install 'trl-qurl[llmcompressor]'`, or use weight_sync='auto'" in message


def test_math_verify_missing(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert train() == "Grading answers needs math_verify: run `pip install 'trl-qurl[math]'`."


# Settings ------------------------------------------------------------------------------------------------------------


def test_unknown_scheme(train):
    message = train("--rollout_quantization", "int4")
    assert message == (
        f"Unknown quantization scheme 'int4'; did you mean 'w4a16'? Choose one of {', '.join(map(repr, SCHEMES))}, or "
        "None ('none' on the command line) for unquantized rollouts."
    )


def test_all_layers_ignored(train):
    message = train("--quantization_ignore", "lm_head", "re:.*layers.*")
    assert "matches all 14 linear layers of Qwen2ForCausalLM, so there is nothing to quantize: narrow the" in message
    assert "rollout_quantization=None" in message


def test_a_model_that_was_never_taught_to_answer(train, model, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text((model / "config.json").read_text())
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    message = train("--model_name_or_path", tmp_path / "base")
    assert message.startswith(f"The tokenizer of {tmp_path / 'base'} has no chat template")
    assert (
        "use the Instruct variant of the model, or set a chat_template on its tokenizer and save both together"
        in message
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="only vLLM's CPU build has so few head sizes")
def test_heads_that_the_engine_has_no_kernel_for(train, tmp_path_factory):
    model = tmp_path_factory.mktemp("narrow")
    tiny_model(hidden_size=64, head_dim=16).save_pretrained(model)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(model)
    message = train("--model_name_or_path", model)
    assert message.startswith(
        "The attention heads of this model are 16 wide, but vLLM's CPU build has kernels only for 32,"
    )


ADAPTER = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--weight_sync", "adapter")
ADAPTER += ("--smooth_activations", "false")
IN_16_BITS = ("--quantization_ignore", *SIXTEEN_BIT_EXPERTS)
CPU_REFUSALS = {
    "float32 engine": (
        *(tiny_model, ("--vllm_engine_kwargs", '{"dtype": "float32"}'), ["--dtype", "float32"]),
        "CPUs with AMX need dtype='bfloat16', not 'float32': set it in vllm_engine_kwargs",
    ),
    "float16 policy": (
        *(lambda: tiny_model(dtype=torch.float16), ("--dtype", "float16"), []),
        "CPUs with AMX need dtype='bfloat16', not 'float16': set it in vllm_engine_kwargs",
    ),
    "OLMo 2": (
        *(lambda: tiny_model("olmo2"), (), []),
        "CPUs with AMX cannot run its transformers backend: set rollout_quantization=None",
    ),
    "transformers backend": (
        *(tiny_model, ("--vllm_model_impl", "transformers"), ["--model-impl=transformers"]),
        "CPUs with AMX cannot run its transformers backend: set rollout_quantization=None",
    ),
    "routing": (
        *(lambda: tiny_mixture("glm4_moe"), (), []),
        "INT8 experts only of mixtral, olmoe, qwen2_moe, qwen3_moe, not of glm4_moe: add 're:",
    ),
    "sizes": (
        *(lambda: tiny_mixture("qwen3_moe", moe_intermediate_size=80), (), []),
        "INT8 experts only with multiples of 32 as sizes, not 128 and 80: add 're:",
    ),
    "gpt-oss": (lambda: tiny_mixture("gpt_oss"), (), [], "No sync can load the experts of gpt-oss"),
    "gpt-oss, experts in 16 bits": (
        *(lambda: tiny_mixture("gpt_oss"), IN_16_BITS, ["--ignore", SIXTEEN_BIT_EXPERTS[1]]),
        "No sync can load the experts of gpt-oss",
    ),
    "gpt-oss, not quantized": (
        *(lambda: tiny_mixture("gpt_oss"), ("--rollout_quantization", "none"), ["--scheme", "none"]),
        "No sync can load the experts of gpt-oss",
    ),
    "adapter": (
        *(
            lambda: tiny_mixture("mixtral"),
            (*ADAPTER, *IN_16_BITS),
            ["--enable-lora"],
        ),
        "vLLM's CPU build runs no adapter beside experts: merge it (weight_sync='auto', no --enable-lora)",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about vLLM's CPU build")
@pytest.mark.parametrize(("made", "arguments", "options", "sentence"), CPU_REFUSALS.values(), ids=CPU_REFUSALS)
def test_what_cpus_with_amx_cannot_run(made, arguments, options, sentence, train, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_tile": True})
    monkeypatch.setattr("os.execve", lambda *arguments: pytest.fail("a server was started"))
    with TemporaryDirectory() as model:
        made().save_pretrained(model)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        tokenizer.save_pretrained(model)
        said = train("--model_name_or_path", model, *arguments)
        assert sentence in said and said.endswith(", or use a GPU.")
        assert cli.main(["serve", model, *options]) == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="about vLLM's CPU build")
@pytest.mark.parametrize(("family", "is_refused"), [("olmo2", True), ("llama", False)])
def test_a_model_that_was_made_here_is_known_by_its_class(family, is_refused, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_tile": True})
    model = tiny_model(family)
    assert model.config.architectures is None
    with pytest.raises(ValueError, match="its transformers backend") if is_refused else nullcontext():
        prepare_process(model, stream_of(model, SCHEMES["int8"]), {"model_impl": "auto"}, 2)


def test_a_format_that_the_gpu_has_no_kernel_for(train, model, monkeypatch, capfd):
    monkeypatch.setattr("trl_qurl.rollout.engine.hardware.gpu_capability", lambda: (8, 0))
    sentence = "FP8 rollouts need a GPU of compute capability 8.9 or higher: choose another rollout_quantization"
    assert train("--rollout_quantization", "fp8").startswith(sentence)
    assert cli.main(["serve", str(model), "--scheme", "fp8"]) == 2
    assert sentence in capfd.readouterr().err


def test_recurrent_layers(train, tmp_path_factory, capfd):
    model = tmp_path_factory.mktemp("mamba")
    size = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    MambaForCausalLM(MambaConfig(**size, pad_token_id=0, eos_token_id=1)).save_pretrained(model)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(model)
    sentence = "MambaForCausalLM has recurrent layers (Mamba, linear attention, convolutions), and no sync is known"
    assert train("--model_name_or_path", model).startswith(sentence)
    assert cli.main(["serve", str(model)]) == 2
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        (MambaForCausalLM, True),
        (Mamba2ForCausalLM, True),
        (FalconH1ForCausalLM, True),
        (JambaForCausalLM, True),
        (NemotronHForCausalLM, True),
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
    with pytest.raises(ValueError, match=f"{kind.__name__} has recurrent") if refused else nullcontext():
        check_recurrent_layers(model)


# Questions -----------------------------------------------------------------------------------------------------------


def test_questions_without_answers(train, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "1 + 1?", "result": "2"}\n')
    message = train("--dataset", tmp_path / "bad.jsonl")
    assert "no answer or final_answer or solution or ground_truth; its columns are question, result: " in message
    assert "rename the columns, or, for training, set question_column and answer_column" in message


def test_questions_that_do_not_fill_a_rollout(train, tmp_path):
    (tmp_path / "few.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 31)
    message = train("--dataset", tmp_path / "few.jsonl")
    assert message.startswith("train_dataset has 31 prompts, but a rollout needs 32 (per_device_train_batch_size x")


# The checkpoint directory --------------------------------------------------------------------------------------------


@contextmanager
def mounted(directory, options):
    directory.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


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


# The server ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["vllm_server_base_url", "vllm_server_port"])
def test_no_server(setting, train):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    named = {
        "vllm_server_base_url": ("--vllm_server_base_url", url),
        "vllm_server_port": ("--vllm_server_host", "127.0.0.1", "--vllm_server_port", str(port)),
    }
    message = train("--vllm_mode", "server", *named[setting], "--vllm_server_timeout", "1")
    assert message.startswith(f"No vLLM server answers at {url} after 1 seconds. Start one with `trl-qurl serve")
    assert message.endswith("or correct vllm_server_base_url.")


@contextmanager
def answering(config, workers=None, statuses=None, asked=None, version=None, silent=None, started=None):
    """What a vLLM server says about itself, without the half minute that a real one takes to start.

    `config` is vLLM's, which workers without our extension do not return, nor does a server without development
    endpoints (`None`). By path, `statuses` are what it answers with instead; `asked` gets every path that is asked
    for, and `silent` is a path to which the answer never comes. `started` is its fingerprint.
    """
    is_ours = bool(config) and config["parallel_config"]["worker_extension_cls"] == WORKER_EXTENSION
    of_config = {"results": [config]} if is_ours else None
    released = threading.Event()
    answers = {"/health": {}, "/v1/models": {"data": [{"id": "model"}]}, "/version": {"version": version}}
    answers |= {"/server_info": config and {"vllm_config": config}, "/collective_rpc": {"results": [workers]}}
    answers |= {"/reset_prefix_cache": "", "/reset_encoder_cache": ""}  # nothing, as vLLM says of the second

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            of_tensors = {"results": [started or {}]} if b'"starting_fingerprint"' in body else None
            self.do_GET(b'"describe_config"' in body, of_tensors)

        def do_GET(self, asks_for_config=False, of_tensors=None):
            path = self.path.split("?")[0]
            if asked is not None:
                asked.append(path)
            if path == silent:
                released.wait(20.0)  # and then hangs up, so that a client without a limit fails this test
                self.close_connection = True
                return
            answer = of_config if asks_for_config else of_tensors or answers.get(path)
            missing = 500 if asks_for_config and config else 404
            status = (statuses or {}).get(path, missing if answer is None else 200)
            text = b"" if answer == "" else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            if status == 500:  # as uvicorn does, which closes the connection once it has logged the fault
                self.close_connection = True
                time.sleep(0.1)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        released.set()
        server.shutdown()


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_quantized_server_for_an_unquantized_run(train, int8_server):
    message = train(
        "--vllm_mode", "server", "--vllm_server_base_url", int8_server.url, "--rollout_quantization", "none"
    )
    assert "8-bit int-quantized weights, but rollout_quantization=None sends unquantized" in message
    assert "Restart it with `trl-qurl serve MODEL --scheme none`" in message


DESCRIPTION = {"block_size": 16, "max_model_len": 64, "dtype": None}
DESCRIPTION |= {"kv_cache_dtype": "auto", "max_lora_rank": 0}
WITHOUT_NCCL = {"parallel_config": {"worker_extension_cls": WORKER_EXTENSION}, "weight_transfer_config": None}
WITH_NCCL = WITHOUT_NCCL | {"weight_transfer_config": {"backend": "nccl"}}


def shapes_of(weights):
    return {name: shape for name, _, shape in stream_metadata(weights)}


def test_unquantized_server_for_a_quantized_run(train):
    with answering(WITHOUT_NCCL, DESCRIPTION) as url:
        message = train("--vllm_mode", "server", "--vllm_server_base_url", url)
    assert "as rollout_quantization='int8' sends it: other formats, layers or another model: " in message
    assert "first model.layers.0.mlp.down_proj.weight_scale (int8, shape [128, 1] here and none there)" in message
    assert "Restart it with `trl-qurl serve MODEL --scheme int8`" in message


def test_server_with_packed_weights_of_another_width():
    run = {name: stream_of(tiny_model(), name) for name in ("w8a16", "w4a16")}
    given = {name: {"plan": weights.plan, "shapes": shapes_of(weights)} for name, weights in run.items()}
    started = fingerprint(run["w8a16"].plan.schemes, shapes_of(run["w8a16"]))
    with answering(WITH_NCCL, DESCRIPTION, version="0.31.0", started=started) as url:
        ServedEngine(base_url=url, **given["w8a16"]).init_communicator()
        message = r"down_proj.weight_scale \(w4a16, shape \[128, 1\] here and w8a16, shape \[128, 1\] there\). Restart"
        with pytest.raises(ValueError, match=message):
            ServedEngine(base_url=url, **given["w4a16"]).init_communicator()


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_server_that_keeps_other_layers_in_16_bits(train, int8_server):
    # As many patterns as the server's, for other layers; then another pattern for the same layers.
    server = ("--vllm_mode", "server", "--vllm_server_base_url", int8_server.url)
    message = train(*server, "--quantization_ignore", "re:.*(lm_head|layers.1.*down_proj)")
    first = "first model.layers.1.mlp.down_proj.weight_scale (none here and int8, shape [128, 1] there)"
    assert f"2 tensors differ, {first}. Restart it with `trl-qurl" in message
    weights = stream_of(tiny_model(), SCHEMES["int8"], ["re:.*head"])
    shapes = {name: shape for name, _, shape in stream_metadata(weights)}
    ServedEngine(base_url=int8_server.url, plan=weights.plan, shapes=shapes).init_communicator("cpu")


def test_server_with_a_cache_that_no_check_knows(train):
    with answering(WITHOUT_NCCL, {**DESCRIPTION, "kv_cache_dtype": "int8_per_token_head"}) as url:
        message = train("--vllm_mode", "server", "--vllm_server_base_url", url)
    start = f"--kv-cache-dtype of the vLLM server at {url} is 'int8_per_token_head', a format of the key-value cache"
    assert message.startswith(start)


START = "start it with `trl-qurl serve MODEL --scheme w4a16 --enable-lora --max-lora-rank"
WHOLE = "The server accepts adapters (--enable-lora), but this run would send whole weights"
RANK_9 = ("--use_peft", "--lora_r", "9", "--lora_target_modules", "all-linear")


@pytest.mark.parametrize(
    ("served_rank", "arguments", "parts"),
    [
        (
            0,
            (*RANK_9, "--weight_sync", "adapter"),
            ("the server accepts no adapters, but this one has rank 9", f"{START} 16`"),
        ),
        (
            0,
            (*RANK_9, "--round_base", "true"),
            ("the server accepts no adapters, but this one has rank 9", f"{START} 16`"),
        ),
        (8, (*RANK_9, "--weight_sync", "adapter"), ("adapters up to rank 8, but this one has rank 9", f"{START} 16`")),
        (8, RANK_9, (WHOLE, "adapters up to rank 8, but this one has rank 9", "start it without --enable-lora")),
        (16, (*RANK_9, "--weight_sync", "checkpoint"), (WHOLE, "(weight_sync='checkpoint')", "without --enable-lora")),
        (16, (), (WHOLE, "(the policy has no adapter (peft_config))", "start it without --enable-lora")),
    ],
    ids=["none, asked for", "none, rounded", "rank, asked for", "rank", "asked to be merged", "no adapter"],
)
def test_server_that_takes_no_such_adapter(served_rank, arguments, parts, train):
    weights = stream_of(tiny_model(), "w4a16")
    started, served = fingerprint(weights.plan.schemes, shapes_of(weights)), {"max_lora_rank": served_rank}
    with answering(WITHOUT_NCCL, {**DESCRIPTION, **served}, started=started) as url:
        connection = ["--vllm_mode", "server", "--vllm_server_base_url", url, "--rollout_quantization", "w4a16"]
        message = train(*connection, *arguments)
    assert all(part in message for part in parts), message


def test_server_on_another_base():
    with answering(None, {"a": "1", "b": "2"}) as url:
        client = ServedEngine(base_url=url)
        client.check_base({"a": "1", "b": "2"})
        with pytest.raises(
            SyncError, match=f"server at {url} has a different base .*: of 2 tensors, 1 different .first b"
        ):
            client.check_base({"a": "1", "b": "3"})


@pytest.mark.parametrize(
    "config",
    [
        {"parallel_config": {"worker_extension_cls": ""}},
        None,  # VLLM_SERVER_DEV_MODE is not set
    ],
    ids=["no worker extension", "no development endpoints"],
)
def test_server_that_cannot_load_weights(config):
    with answering(config) as url:
        client = ServedEngine(base_url=url)
        with pytest.raises(ValueError, match=f"{url} cannot load weights: .*. Restart it with `trl-qurl serve MODEL"):
            client.init_communicator("cpu")


@pytest.mark.parametrize("path", ["/v1/models", "/collective_rpc"])
def test_server_that_accepts_and_never_answers(path, train):
    asked = []
    with answering(None, asked=asked, silent=path) as url:
        message = train("--vllm_mode", "server", "--vllm_server_base_url", url, "--vllm_request_timeout", "1")
    assert f"{url} did not answer {path} within 1 seconds: it hangs, or needs a larger vllm_request_timeout" in message
    assert asked.count(path) == 1, "a request whose answer never came is not repeated"


def test_a_request_of_trls_own_is_bounded_too():
    path, image = "/v1/chat/completions/render", SimpleNamespace(save=lambda *args, **kwargs: None)
    with answering(None, silent=path) as url, pytest.raises((requests.Timeout, ServerError)):
        ServedEngine(base_url=url, request_timeout=1.0).image_features([[image]])


def test_trl_does_not_wait_for_the_server_without_a_limit():
    asked = []
    with answering(None, asked=asked) as url:
        ServedEngine(base_url=url)
    assert asked.count("/health") == 1, "the parent asks as well, and would wait for ever"


def test_server_that_wants_a_key():
    with answering(None, statuses={"/collective_rpc": 401}) as url:
        client = ServedEngine(base_url=url)
        with pytest.raises(ServerError, match=f"{url} requires an API key: set VLLM_API_KEY for the trainer"):
            client.version()


def test_a_server_with_nccl_and_one_without():
    for config, obstacle in ((WITH_NCCL, None), (WITHOUT_NCCL, "started without --weight-transfer-config")):
        asked = []
        with answering(config, DESCRIPTION, asked=asked) as url:
            client = ServedEngine(base_url=url)
            client.init_communicator()
            assert client.stream_obstacle == (obstacle and f"the server was {obstacle}")
        assert "/server_info" not in asked, "which takes vLLM seconds"


def test_a_server_that_says_nothing_about_its_cache():
    with answering(None, {}) as url:
        ServedEngine(base_url=url).load_checkpoint(Path("nowhere"), WeightUpdate("v1"))


def test_after_one_failure_the_server_is_not_asked_again():
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
