"""`trl-qurl serve`: the checkpoint it prepares, the command it becomes, and how it ends."""

import asyncio
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import requests
from conftest import FORGET_OURS, Server, completed
from tiny import save_remote_code_model, save_tiny, tiny_model
from tiny_vision import tiny_vision_model

from trl_qurl import cli
from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.files import CACHE_VARIABLE
from trl_qurl.rollout.engine import guard, http, launch
from trl_qurl.rollout.repairs import cpu_memory, dead_engine
from trl_qurl.rollout.wire import WORKER_EXTENSION


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    save_tiny(tmp_path / "model")
    return tmp_path / "model"


def command(model, *options):
    """The command that a server of a checkpoint becomes."""
    return launch.server_command(str(model), "127.0.0.1", 8000, [*options])


def option(words, name):
    return words[words.index(name) + 1]


def quantized(model, scheme="int8", ignore=("lm_head",)):
    return launch.starting_checkpoint(str(model), scheme, ignore, {})


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
    writes = []
    together = threading.Barrier(4)
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
    assert len(places) == 1
    assert len(writes) == 1
    assert quantized(model, ignore=["lm_head", "re:.*down_proj"]) not in places
    [place] = places
    assert (place / "config.json").exists()
    assert (place / "model.safetensors").exists()


ALWAYS = (
    "--host 127.0.0.1 --port 8000",
    "--logprobs-mode processed_logprobs --max-logprobs -1",
    f"--worker-extension-cls {WORKER_EXTENSION}",
)


@pytest.mark.parametrize(
    ("found", "start"),
    [
        (["vllm"], "-m vllm.entrypoints.cli.main serve MODEL"),
        ([], "-m vllm.entrypoints.openai.api_server --model MODEL"),
    ],
    ids=["CUDA build", "CPU build"],
)
def test_the_command_fits_the_build_of_vllm(found, start, cpu, monkeypatch):
    packages = {"vllm": found}
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: packages.get(name, []))
    text = " ".join(command(cpu, "--max-model-len", "64"))
    for part in (start.replace("MODEL", str(cpu)), *ALWAYS):
        assert part in text
    assert text.endswith("--max-model-len 64"), "options of vLLM's are passed on"


def test_pictures_are_taken_where_the_model_sees(tmp_path):
    tiny_vision_model("llava_next").config.save_pretrained(tmp_path)
    assert "--enable-scale-out" in command(tmp_path)
    tiny_model().config.save_pretrained(tmp_path)
    assert "--enable-scale-out" not in command(tmp_path)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU with 16 GiB, and a checkpoint of half a GiB."""
    tiny_model().config.save_pretrained(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    properties = SimpleNamespace(total_memory=16 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**29)
    return str(tmp_path)


def test_weight_transfer_is_offered_where_there_is_cuda(gpu, monkeypatch):
    assert "--weight-transfer-config" in command(gpu)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not {"--weight-transfer-config", "--gpu-memory-utilization"} & set(command(gpu))


def test_a_gpu_keeps_room_for_new_weights(gpu):
    # Of 16 GiB, 4 x 0.5 GiB: 0.92 - 2 / 16 = 0.795, rounded down.
    assert option(command(gpu), "--gpu-memory-utilization") == "0.79"
    assert launch.memory_share(14 * 2**30, 80 * 2**30) == 0.87  # 0.92 - 4 / 80
    assert launch.memory_share(14 * 2**30, 4 * 2**30) == 0.46  # never less than half of vLLM's own
    for given in ("--gpu-memory-utilization 0.9", "--gpu-memory-utilization=0.9"):
        words = command(gpu, *given.split())
        assert " ".join(words).count("--gpu-memory-utilization") == 1


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """A machine without a GPU, with 12 GB of free memory, and a checkpoint of 1 GB."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(cpu_memory, "free_memory", lambda: 12 * 10**9)
    tiny_model().config.save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10**9)
    return tmp_path


def test_a_cpu_takes_memory_that_is_free(cpu, monkeypatch):
    each = cache_of_a_token()
    taken = {
        # vLLM's own number of sequences, and an empty block
        "--max-model-len=8192": 128 * 8193 * each,
        # 400 times 8 blocks
        "--max-model-len 1000 --max-num-seqs 400 --dtype=float32": 2 * 128 * 3201 * each,
        # half of 12 GB less weights and 1 GiB for the process
        "--max-num-seqs=10000000": (11 * 10**9 - 2**30) // 2,
        # what the model allows
        "--max-model-len 8k": cpu_memory.MIN_CACHE,
    }
    for given, needed in taken.items():
        assert option(command(cpu, *given.split()), "--kv-cache-memory-bytes") == str(needed)
    chosen = "--gpu-memory-utilization .4|--gpu_memory_utilization=.4|--kv-cache-memory-bytes=9"
    for given in chosen.split("|"):
        ours = " ".join(command(cpu, *given.split())).removesuffix(given)
        assert not re.search("--[a-z-]*memory", ours), "the user's choice comes first"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert "--kv-cache-memory-bytes" not in command(cpu)


def cache_of_a_token():
    config = tiny_model().config
    return config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def test_the_cache_of_a_model_with_its_own_code(tmp_path, cpu):
    directory = save_remote_code_model(tmp_path / "own")
    least = {"kv_cache_memory_bytes": cpu_memory.MIN_CACHE}
    for trusted in (True, ""):  # as on a command line
        given = {"trust_remote_code": trusted}
        assert cpu_memory.cpu_cache_arguments(directory, given, 1, 1) == least
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        cpu_memory.cpu_cache_arguments(directory, {"trust_remote_code": False}, 1, 1)


def test_a_cpu_keeps_only_what_a_rollout_needs(cpu):
    def kept(context, sequences, length, **share):
        given = {"max_model_len": context}
        found = cpu_memory.cpu_cache_arguments(str(cpu), given, sequences, length, **share)
        return found["kv_cache_memory_bytes"]

    # two blocks of 128 tokens each; vLLM leaves a block empty
    assert kept(512, 1024, 200) == 128 * 2049 * cache_of_a_token()
    whole = (2**20 + 128) * cache_of_a_token()
    assert kept(2**20, 1, 200) == whole, "room for a whole context"
    free = 11 * 10**9 - 2**30
    assert kept(512, 10**6, 512, share=0.3) == int(0.3 * free)


@pytest.mark.parametrize(("own", "read"), [(1, 1), (2, 0)], ids=["visible", "invisible"])
def test_the_memory_of_the_node_that_the_process_runs_on(own, read, monkeypatch):
    gigabytes = {0: 10, 1: 11}
    nodes = "vllm.utils.cpu_resource_utils."
    monkeypatch.setattr(nodes + "get_visible_memory_node", lambda: [*gigabytes])
    monkeypatch.setattr(nodes + "get_allowed_cpu_list", lambda: [SimpleNamespace(numa_node=own)])
    monkeypatch.setattr(
        nodes + "get_memory_node_info",
        lambda node: SimpleNamespace(available_memory=gigabytes[node] * 10**9),
    )
    assert cpu_memory.free_memory() == gigabytes[read] * 10**9


def test_a_cpu_without_enough_free_memory_is_one_line(cpu, monkeypatch, capsys):
    monkeypatch.setattr(cpu_memory, "free_memory", lambda: 2 * 10**9)
    monkeypatch.setattr(launch, "run_server", lambda *arguments: pytest.fail("it was started"))
    assert cli.main(["serve", str(cpu), "--scheme", "none"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search("2.0 GB .* free.* 1.0 GB for weights and about 1.2 GB", line)


def test_the_share_that_is_lowered_is_vllms_own():
    from vllm.config import CacheConfig

    assert CacheConfig().gpu_memory_utilization == launch.MEMORY_SHARE


def test_a_front_end_that_checks_no_key_is_refused(model, monkeypatch, capsys):
    monkeypatch.setattr(launch, "run_server", lambda *arguments: 0)
    for status, value in ((0, "0"), (2, "1")):
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", value)
        assert cli.main(["serve", str(model), "--scheme", "none"]) == status
    assert "VLLM_USE_RUST_FRONTEND is set" in capsys.readouterr().err


@pytest.mark.parametrize("start", ["--kv-cache-dtype ", "--kv_cache_dtype="])
def test_a_cache_whose_scales_no_sync_makes_is_refused(start):
    with pytest.raises(ValueError, match="--kv.cache.dtype is 'nvfp4'"):
        launch.check_options(["--enforce-eager", *f"{start}nvfp4".split()])
    for accepted in ("bfloat16", "fp8"):
        launch.check_options([*f"{start}{accepted}".split(), "--enforce-eager"])


@pytest.mark.parametrize(
    "setting", ["logits-processors=ban:Ban", "speculative-config={}", "generation-config=vllm"]
)
def test_what_a_trainer_cannot_score_is_refused(setting, model, capsys):
    assert cli.main(["serve", str(model), f"--{setting}"]) == 2
    said = capsys.readouterr()
    name, _, _ = setting.replace("-", "_").partition("=")
    assert f"'{name}'" in said.err
    assert "Quantizing" not in said.out, "something was begun first"


# The key
# --------------------------------------------------------------------------------------------------


def test_no_server_starts_without_a_key(model, monkeypatch, capsys):
    monkeypatch.setattr("os.execve", lambda *arguments: pytest.fail("it was started"))
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert_no_key_is_found(model, capsys)
    monkeypatch.delenv("VLLM_API_KEY")
    assert_no_key_is_found(model, capsys)


def assert_no_key_is_found(model, capsys):
    assert cli.main(["serve", str(model)]) == 2
    said = capsys.readouterr()
    assert re.search("VLLM_API_KEY is not set.*`export .* trainer", said.err)
    assert "Quantizing" not in said.out, "something was begun first"


def test_the_key_is_neither_printed_nor_in_the_command(model, capfd, monkeypatch):
    execve = MagicMock()
    monkeypatch.setattr("os.execve", execve)
    monkeypatch.setenv(guard.API_KEY_VARIABLE, "a-secret")
    cli.main(["serve", str(model), "--scheme", "none"])
    execve.assert_called_once()
    _, words, environment = execve.call_args.args
    assert environment[guard.API_KEY_VARIABLE] == "a-secret"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert str(model) in words
    assert "--disable-uvicorn-access-log" in words
    assert "a-secret" not in " ".join([*words, *capfd.readouterr()])


def answers_of_guard(header, kind="http", path="/collective_rpc"):
    async def app(scope, receive, send):
        sent.append("passed")

    async def send(message):
        sent.append(message.get("status", message.get("code")))

    sent = []
    headers = [] if header is None else [(b"authorization", header.encode())]
    scope = {"type": kind, "path": path, "method": "POST", "headers": headers}
    asyncio.run(guard.KeyGuard(app)(scope, None, send))
    return sent


@pytest.mark.parametrize(
    "header", [None, "Basic right", "Bearer ", "Bearer wrong", "Bearer righ\xe9"]
)
def test_what_is_not_the_key_opens_nothing(header, monkeypatch):
    monkeypatch.setenv(guard.API_KEY_VARIABLE, "right")
    for path in ("/collective_rpc", "/health/", "/v1/models"):
        assert answers_of_guard(header, path=path) == [401, None]
    for path in ("/collective_rpc", "/health"):
        assert answers_of_guard(header, "websocket", path) == [1008]
    assert answers_of_guard(header, path="/health") == ["passed"]
    assert answers_of_guard(header, "lifespan") == ["passed"]


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_key_opens_all(kind, monkeypatch):
    monkeypatch.setenv(guard.API_KEY_VARIABLE, "right")
    assert answers_of_guard("Bearer right", kind) == ["passed"]


# An engine that dies
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_ends_with_its_engine(has_begun):
    """As one to the workers, whose answer vLLM would await forever."""
    engine = SimpleNamespace(errored=False)
    ended = []

    async def app(scope, receive, send):
        if has_begun:
            await send({"type": "http.response.start", "status": 200})
        engine.errored = True
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("app")

    sent = answers_of_watch(app, engine)
    assert ended == ["app"]
    statuses = [message.get("status") for message in sent]
    assert statuses == ([200] if has_begun else [500, None])


def test_what_vllm_says_of_a_dead_engine_comes_first():
    async def app(scope, receive, send):
        await asyncio.sleep(0.1)
        await send("EngineDeadError")

    assert answers_of_watch(app, SimpleNamespace(errored=True)) == ["EngineDeadError"]


def test_an_engine_may_take_its_time_and_errors_are_passed_on():
    async def app(scope, receive, send):
        await asyncio.sleep(3 * dead_engine.WATCH_SECONDS)
        raise ConnectionError("of the app")

    with pytest.raises(ConnectionError, match="of the app"):
        answers_of_watch(app, SimpleNamespace(errored=False))


def answers_of_watch(app, engine):
    async def send(message):
        sent.append(message)

    sent = []
    server = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    watched = dead_engine.EngineWatch(app)
    answer = watched({"type": "http", "app": server}, None, send)
    asyncio.run(asyncio.wait_for(answer, 20))
    return sent


def test_the_watch_is_behind_the_key(cpu):
    # vLLM puts the last one first
    both = f"--middleware {dead_engine.ENGINE_WATCH} --middleware {guard.KEY_GUARD}"
    words = " ".join(command(cpu))
    assert both in words
    assert words.count("--middleware") == 2


@pytest.mark.vllm
def test_a_process_without_our_modules_loads_what_a_server_loads_by_name(warm_python):
    """First of all that is ours, as in vLLM's workers; the servers of these tests have imported
    everything before.
    """
    code = f"import pydoc\nassert pydoc.locate({WORKER_EXTENSION!r}).load_rollout_weights"
    completed(warm_python, "-c", FORGET_OURS + code)


UNLISTED = """\
get /
get /docs
get /metrics
get /openapi.json
get /nothing
options /collective_rpc
head /server_info
post //collective_rpc"""


@pytest.mark.vllm
@pytest.mark.xdist_group("server")
def test_every_path_of_a_server_needs_the_key(int8_server):
    key = os.environ[guard.API_KEY_VARIABLE]

    def ask(verb, path, **authorization):
        """The answer to a request, without a password of this machine's."""
        with requests.Session() as session:
            session.trust_env = False
            return session.request(verb, f"{int8_server.url}{path}", timeout=30, **authorization)

    routes = ask("get", "/openapi.json", auth=http.add_key).json()["paths"]
    needed = {"/collective_rpc", "/reset_prefix_cache", "/server_info", "/v1/completions"}
    assert needed <= routes.keys()
    pairs = [(method, path) for path, methods in routes.items() for method in methods]
    pairs += [pair.split() for pair in UNLISTED.splitlines()]
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {key}"}):
        opened = [pair for pair in pairs if ask(*pair, headers=headers).status_code != 401]
        assert opened == [("get", "/health")]
    # With it, the trainers of the other tests use this server.
    assert ask("get", "/server_info", auth=http.add_key).status_code == 200
    assert key not in int8_server.log.read_text()


@pytest.mark.vllm
def test_control_c_during_the_start_leaves_no_process_behind(model, warm_python, tmp_path):
    server = Server(model, tmp_path, "--scheme", "int8", python=warm_python, has_worker=True)
    try:
        deadline = time.monotonic() + 120
        # the server with its stand-in, and what vLLM starts for its engine
        while len(server.survivors()) < 5:
            assert time.monotonic() < deadline
            assert server.process.poll() is None
            time.sleep(0.02)
        assert "INFO:     Application startup complete" not in server.log.read_text()
        server.stop(signal.SIGINT)
        assert not server.survivors_after(60)
    finally:
        server.kill()
