"""Streaming to a server: what is announced, sent, received and digested, with a stand-in for NCCL.

The two ends are real: our client with its sender, our worker with its receiver and vLLM's NCCL
engine, which opens the group. Between them, two threads hand tensors over in memory instead of two
GPUs.
"""

import functools
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import free_port, needs_avx512
from peft import LoraConfig, get_peft_model
from support.fake_server import FakeServer, NoStream
from support.training import MOVED, SAME
from tiny import WHOLE_BLOCKS, rollout_settings, stream_of, tiny_mixture, tiny_model
from vllm.utils.network_utils import get_ip

from trl_qurl.quantization import SCHEMES, make_plan, write_checkpoint
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.quantization.uaq import scale_model_
from trl_qurl.rollout.checks.server import difference
from trl_qurl.rollout.checks.tensors import MeteredStream
from trl_qurl.rollout.engine import served
from trl_qurl.rollout.engine.broadcast import Broadcast
from trl_qurl.rollout.engine.colocated import ColocatedEngine
from trl_qurl.rollout.errors import ServerError, ServerLostError, SyncError
from trl_qurl.rollout.group import APART, TOGETHER
from trl_qurl.rollout.routes import StreamRoute, choose_route, stream_metadata
from trl_qurl.rollout.sync import RolloutCost, WeightSync
from trl_qurl.rollout.wire import EngineDescription, WeightUpdate

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op`:FutureWarning")

INT8 = SCHEMES["int8"]
FP8 = SCHEMES["fp8"]
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)

formats = pytest.mark.parametrize("scheme", [INT8, FP8, None], ids=["int8", "fp8", "bf16"])


def stream(model, scheme=INT8):
    return stream_of(model, scheme).tensors(model_parameters(model))


def announced(model, scheme=INT8):
    return stream_metadata(stream_of(model, scheme))


def described(tensors):
    found = []
    for name, tensor in tensors.items():
        found.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
    return found


def send(client, model, version="v1", digest=False):
    """Stream a model in INT8."""
    sent = MeteredStream(stream(model), {} if digest else None)
    client.load_stream(sent, WeightUpdate(version, digest, announced(model)))
    return sent


# What is announced
# --------------------------------------------------------------------------------------------------


def test_vectors_that_an_engine_holds_in_float32_are_not_cast():
    model = tiny_mixture("glm4_moe")
    sent = stream_of(model, INT8).tensors(model_parameters(model), dtype=torch.bfloat16)
    kept = {name for name, tensor in sent if tensor.dtype is torch.float32}
    vectors = {name for name in kept if not name.endswith("_scale")}
    assert vectors == {"model.layers.1.mlp.gate.e_score_correction_bias"}


# From end to end
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    return FakeServer()


@pytest.fixture
def client(server):
    """A client with an open stream to the server's worker."""
    client = server.client()
    server.connect(client)
    server.asked.clear()
    return client


@formats
def test_tensors_arrive_in_order_and_bit_for_bit(scheme, client, server):
    model = tiny_model(dtype=torch.bfloat16)
    metadata = announced(model, scheme)
    sent = MeteredStream(stream(model, scheme), {})
    client.load_stream(sent, WeightUpdate("v1", True, metadata))
    assert server.asked == ["load_rollout_weights", "/reset_prefix_cache", "/reset_encoder_cache"]
    assert server.worker.reloads == 1
    assert len(server.worker.rollout_digests) == len(metadata)
    client.compare_digests(sent.digests)
    assert described(server.worker.model.loaded) == metadata
    assert client.version() == "v1"
    client.load_stream(stream(model, scheme), WeightUpdate("v2", False, metadata))
    assert client.version() == "v2"
    with pytest.raises(SyncError, match=f"of {len(metadata)} tensors, {len(metadata)} missing"):
        client.compare_digests(sent.digests)


def test_any_layout_and_dtype_arrives(client, server):
    """NCCL sends memory as it lies, and has no name for some dtypes of formats."""
    sent = {
        "transposed": torch.arange(6, dtype=torch.int32).view(2, 3).t(),
        "scalar": torch.tensor(3.5),
        "exponents": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "a part": torch.arange(8, dtype=torch.bfloat16)[3:5],
        "nothing": torch.empty(0, 4),
    }
    client.load_stream(sent.items(), WeightUpdate("v1", False, described(sent)))
    loaded = server.worker.model.loaded
    assert described(loaded) == described(sent)
    for name, tensor in loaded.items():
        assert torch.equal(tensor.float(), sent[name].float()), name


def test_a_server_that_refuses_says_why(client, server):
    server.worker.reload_weights = MagicMock(side_effect=RuntimeError("no reload here"))
    with pytest.raises(ServerError, match="no reload here"):
        send(client, tiny_model())
    assert client._broadcast.wait(5.0), "a run that recovers opens another one"
    # Half loaded, vLLM cannot be loaded again; whoever tries is told.
    with pytest.raises(RuntimeError, match="restart the server, or the run"):
        server.worker.load_rollout_weights({"version": "v2"})


@pytest.mark.parametrize("are_done", ["after the last", "too early"])
def test_workers_that_are_done_before_the_trainer(are_done, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    request = Future()

    def tensors():
        yield "one", torch.zeros(2)
        request.set_result(None)  # before the sender knows whether there is another
        if are_done == "too early":
            yield "two", torch.zeros(2)

    broadcast = Broadcast(SimpleNamespace(broadcast=lambda tensor, src, stream: None))
    early = pytest.raises(SyncError, match="before the last tensor")
    with early if are_done == "too early" else nullcontext():
        broadcast.send(tensors(), request)
    assert broadcast.wait(5.0)


def test_a_sender_that_fails_says_why(monkeypatch):
    """And not, long after, that the server did not answer."""
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    communicator = MagicMock()
    communicator.broadcast.side_effect = RuntimeError("unhandled CUDA error")
    broadcast = Broadcast(communicator)
    request = MagicMock()
    request.done.side_effect = [False] * 50  # for five seconds
    with pytest.raises(RuntimeError, match="unhandled CUDA error"):
        broadcast.send([("weight", torch.zeros(2))] * 3, request)


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["int8", pytest.param("w4a16", marks=needs_avx512)])
def test_a_real_engine_computes_with_what_it_received(name, run_scenario, tmp_path):
    record = run_scenario("streamed.py", tmp_path, name)
    assert record["version"] == ["v1"]
    assert record["streamed"] == pytest.approx(record["fresh"], abs=SAME)
    assert record["streamed"] != pytest.approx(record["started"], abs=MOVED)


def times_out(server, path, seconds):
    """Let the server never answer a request, of which the client learns after so many seconds."""

    def before_answer(asked):
        if asked == path:
            time.sleep(seconds)
            raise ServerError(f"The vLLM server did not answer {path} within {seconds} seconds.")

    server.before_answer = before_answer


def test_a_broadcast_that_never_returns_ends_the_run_in_time(client, server, monkeypatch):
    """As to a worker that died inside NCCL: what it waits for never comes, and not even an abort
    calls it back.
    """
    forever = threading.Event()
    client.communicator.broadcast = lambda tensor, src, stream: forever.wait()
    monkeypatch.setattr(served, "BROADCAST_GRACE", 0.1)
    times_out(server, "load_rollout_weights", 0.5)
    try:
        with pytest.raises(ServerError, match="did not answer load_rollout_weights"):
            send(client, tiny_model())
        with pytest.raises(ServerLostError, match="did not end.*did not answer"):
            client.reconnect(1.0)
    finally:
        forever.set()


# Opened, lost, and opened again
# --------------------------------------------------------------------------------------


class OverItsStore:
    """NCCL with its rendezvous: broadcasts go through the group's store, and last until they are
    taken or aborted.
    """

    def __init__(self, group, device):
        self.group = group
        self.device = CPU
        self.count = 0
        self.is_sending = False
        self.aborted = threading.Event()
        group.broadcast_obj("an id", src=0)

    def broadcast(self, tensor, src, stream=None):
        self.count += 1
        if self.group.rank != src:
            tensor.copy_(self.group.broadcast(tensor, src))
            self.group.store.set(f"taken {self.count}", "")
        elif not self.aborted.is_set():
            self.group.broadcast(tensor, src)
            self.is_sending = True
            while not self.aborted.wait(0.001):
                store = self.group.store  # if it is gone, nobody calls NCCL back
                if store is not None and store.check([f"taken {self.count}"]):
                    self.is_sending = False
                    return

    def destroy(self):
        self.aborted.set()


@pytest.fixture
def unopened(server, monkeypatch):
    """A client before it has opened its stream."""
    from vllm.distributed.device_communicators import pynccl

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", OverItsStore)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    return server.client(group_port=free_port())


@pytest.mark.parametrize("lost", ["between two syncs", "in a broadcast"])
def test_a_stream_is_opened_again_when_its_server_has_come_back(lost, unopened, server):
    client = unopened
    model = tiny_model()
    client.open_stream(CUDA)
    send(client, model)
    assert server.worker.loaded_version == "v1"
    for version in ("v2", "v3"):  # as often as a server is lost
        if lost == "between two syncs":
            server.restart()
        else:
            group = server.worker.weight_transfer_engine.model_update_group
            group.broadcast = functools.partial(killed, client)
        with pytest.raises(ServerError, match="NCCL is not open|killed"):
            send(client, model, version)
        if lost == "in a broadcast":
            server.restart()
        client.reconnect(5.0)
        sent = send(client, model, version, digest=True)
        client.compare_digests(sent.digests)
        assert server.worker.loaded_version == client.version() == version
    assert server.asked.count("/init_weight_transfer_engine") == 3


def killed(client, tensor, src):
    """What a worker receives that is lost while the trainer waits inside NCCL, with the next tensor
    at hand.
    """
    while not client.communicator.is_sending or not client._broadcast._ready.full():
        time.sleep(0.001)
    raise RuntimeError("killed")


def test_a_server_that_hangs_while_a_stream_opens_ends_the_run_in_time(unopened, server):
    times_out(server, "/init_weight_transfer_engine", 0.3)
    with pytest.raises(ServerLostError, match="weight_sync=.* did not answer /init_weight"):
        unopened.open_stream(CUDA)
    # If nobody joins its group, vLLM closes a descriptor that is another file's by then
    # (`create_tcp_store`).
    torch.distributed.TCPStore(get_ip(), unopened.group_port, 2, is_master=False, use_libuv=False)


def test_workers_are_not_sent_to_the_group_of_another_run(unopened, server):
    late = socket.create_server((get_ip(), unopened.group_port))
    port = rf"port {unopened.group_port} of"
    with pytest.raises(ServerLostError, match=rf"{port} \S+: vllm_group_port.*in use"):
        unopened.open_stream(CUDA)
    assert "/init_weight_transfer_engine" not in server.asked
    # A run that recovers waits for its port.
    threading.Timer(1.0, late.close).start()
    unopened.reconnect(5.0)
    send(unopened, tiny_model())
    assert unopened.version() == "v1"


def test_tensors_are_made_here_finished_before_they_are_sent_and_kept_until_they_are(
    client, monkeypatch
):
    """The order that GPUs need: several processes gather in one order on one stream, and the side
    stream waits for it.
    """
    log = []
    placed = []

    # Of tests before: a stream that was given up may still be ending.
    others = set(threading.enumerate()) - {threading.main_thread()}

    def note(event):
        thread = threading.current_thread()
        if thread not in others:
            log.append((event, thread is threading.main_thread()))

    accelerator = {
        "is_available": lambda: True,
        "set_device_index": lambda index: placed.append(threading.current_thread()),
        "current_stream": lambda: SimpleNamespace(synchronize=lambda: note("finish")),
        "current_device_index": lambda: 0,
    }
    for name, double in accelerator.items():
        monkeypatch.setattr(torch.accelerator, name, double)
    monkeypatch.setattr(NoStream, "synchronize", lambda stream: note("sent"))
    hand_over = client.communicator.broadcast

    def broadcast(tensor, src, stream):
        assert isinstance(stream, NoStream), "the default stream would wait for dead workers"
        note("send")
        hand_over(tensor, src, stream)

    client.communicator.broadcast = broadcast
    model = tiny_model()

    def made():
        for item in stream(model):
            note("make")
            yield item

    metadata = announced(model)
    client.load_stream(made(), WeightUpdate("v1", False, metadata))
    here = [event for event, is_here in log if is_here]
    there = [event for event, is_here in log if not is_here]
    assert here == ["make", "finish"] * len(metadata)
    assert there == ["send", "sent"] * len(metadata), "its memory is free after it has been sent"
    assert len(placed) == 2, "each thread has its own current device"
    assert threading.main_thread() not in placed
    ahead = 0
    for event, _ in log:
        ahead += (event == "finish") - (event == "send")
        assert ahead >= 0


def test_files_out_of_sight_are_refused_before_anything_is_touched(client, server, tmp_path):
    with pytest.raises(SyncError, match=f"{tmp_path}; set rollout_checkpoint_dir"):
        client.load_checkpoint(tmp_path, WeightUpdate("v1"))
    assert server.worker.reloads == 0
    assert not server.worker.rollout_load_failed


HEAD = "lm_head"
SECOND_DOWN = "re:.*layers.1.*down_proj"  # what the server leaves in 16 bits


@pytest.mark.parametrize("name", SCHEMES)
def test_what_a_server_quantizes_is_compared_by_its_checkpoint(name, tmp_path):
    """Not by patterns: these may be spelled in many ways, and two lists of one length may mean
    different layers.
    """
    model = tiny_model(**WHOLE_BLOCKS)
    write_checkpoint(model, None, name, tmp_path, ignore=[HEAD, SECOND_DOWN])
    client = FakeServer(tmp_path).client()

    def first(*ignore, formats=name):
        """The first difference between a run and the server."""
        client.plan = make_plan(model, formats, ignore)
        metadata = stream_metadata(WeightStream(model, client.plan))
        client.shapes = {name: shape for name, _, shape in metadata}
        return difference(client).partition("first model.layers.")[2]

    assert first(HEAD, "model.layers.1.mlp.down_proj") == ""
    assert first("re:(lm_head|.*1.mlp.down_proj)") == ""
    found = first(HEAD, "re:.*layers.0.*down_proj")
    assert found.startswith(f"0.mlp.down_proj.weight_scale (none here and {name}, shape [")
    found = first(HEAD)
    assert found.startswith(f"1.mlp.down_proj.weight_scale ({name}, shape [")
    assert found.endswith("and none there)")
    other = "fp8" if name == "int8" else "int8"
    mixed = {SECOND_DOWN: "none", "re:.*o_proj": other, "*": name}
    found = first(HEAD, formats=mixed)
    assert found.startswith(f"0.self_attn.o_proj.weight_scale ({other}, shape [128, 1] here and")
    assert "layers.1" not in found
    assert f"and {name}, shape" in found


def sync_to(client, policy, interval, dtype=None):
    """A sync of a policy to the client's server, with no version to ask for."""
    settings = rollout_settings(INT8, vllm_mode="server", sync_check_interval=interval)
    route = StreamRoute(policy, stream_of(policy, INT8), TOGETHER)
    sync = WeightSync(route, settings, RolloutCost(), lambda: 0)
    route.attach(client, dtype)
    client.version = lambda: sync.version
    return sync


@pytest.mark.parametrize(("interval", "is_proven"), [(16, True), (1, True), (0, False)])
def test_every_stream_is_proven_until_a_gpu_has_shown_that_it_need_not_be(
    interval, is_proven, client, server
):
    sync = sync_to(client, tiny_model(), interval)
    for _ in range(3):
        sync.push()
        assert sync.needs_proof == bool(server.worker.rollout_digests) == is_proven
        sync.needs_proof = False


def test_a_sync_without_memory_says_what_to_set(client, monkeypatch):
    sync = sync_to(client, tiny_model(), 0)
    sync.route.group = APART  # as of an engine in this process
    full = torch.OutOfMemoryError("CUDA out of memory.")
    monkeypatch.setattr(sync.route, "send", MagicMock(side_effect=full))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        sync.push()
    assert "vllm_gpu_memory_utilization" in caught.value.__notes__[0]


def test_a_worker_says_how_its_model_is_quantized(client, server):
    held = server.vllm_config
    held.cache_config.cache_dtype = "fp8_e4m3"
    # in 32 bits, as vLLM's kernels need it
    quantized = torch.nn.ParameterDict({"weight_scale": torch.zeros(1)})
    quantized.scheme = object()
    norm = torch.nn.ParameterDict({"weight": torch.zeros(2, dtype=torch.bfloat16)})
    model = torch.nn.ModuleDict({"linear": quantized, "norm": norm})
    server.worker.model = model
    assert client.describe() == EngineDescription(64, "bfloat16", "fp8_e4m3")
    model["gate"] = torch.nn.ParameterDict({"weight": torch.zeros(2, dtype=torch.float32)})
    assert client.describe().dtype is None, "one parameter is in 32 bits, and would be sent in 16"
    held.quant_config = SimpleNamespace(get_name=lambda: "awq")
    held.lora_config = SimpleNamespace(max_lora_rank=16)
    assert client.describe().max_lora_rank == 16
    assert "vLLM's awq there" in difference(client)
    assert len({scheme.served_as for scheme in SCHEMES.values()}) == len(SCHEMES), (
        "two formats that a server mixes up"
    )


# Which way
# --------------------------------------------------------------------------------------------------


ROUTES = """\
auto: stream, the trainer and the server both have NCCL
auto, sharded: checkpoint, streaming a sharded policy is untested on GPUs (weight_sync='stream' forces it)
auto, an obstacle: checkpoint, an obstacle
auto, on a CPU: checkpoint, NCCL needs a CUDA device, and the trainer's is 'cpu'
llmcompressor: llmcompressor, weight_sync='llmcompressor' requests it
llmcompressor, sharded: llmcompressor, weight_sync='llmcompressor' requests it
llmcompressor, an obstacle: llmcompressor, weight_sync='llmcompressor' requests it
llmcompressor, on a CPU: llmcompressor, weight_sync='llmcompressor' requests it
stream: stream, weight_sync='stream' requests it
stream, sharded: stream, weight_sync='stream' requests it
stream, an obstacle: weight_sync='stream' is not possible: an obstacle
stream, on a CPU: weight_sync='stream' is not possible: NCCL needs a CUDA device, and the trainer's is 'cpu'"""
MACHINES = {
    "": (CUDA, None, False),
    ", sharded": (CUDA, None, True),
    ", an obstacle": (CUDA, "an obstacle", True),
    ", on a CPU": (CPU, None, False),
}


def test_how_weights_travel():
    said = []
    for requested in ("auto", "llmcompressor", "stream"):
        for name, machine in MACHINES.items():
            try:
                why = ", ".join(choose_route(requested, *machine))
            except ValueError as error:
                why, _, advice = str(error).partition(". ")
                assert "set weight_sync='checkpoint'" in advice
            said.append(f"{requested}{name}: {why}")
    assert "\n".join(said) == ROUTES


@pytest.mark.parametrize("cleared", [True, False])
def test_a_colocated_engine_clears_what_old_weights_cached(cleared):
    llm = MagicMock()
    llm.reset_prefix_cache.return_value = cleared  # False while requests run
    with nullcontext() if cleared else pytest.raises(SyncError, match="prefix cache"):
        ColocatedEngine(llm).load_stream([], WeightUpdate("weights-1"))
    llm.reset_prefix_cache.assert_called_once_with()


@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize("adapter", ["full", "LoRA"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_stream_to_a_server(dtype, adapter, head, client, server):
    policy = tiny_model(tie_word_embeddings=head == "tied")
    if adapter == "LoRA":
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        policy = get_peft_model(policy, lora)
    else:
        scale_model_(policy, 1.5)
    sync = sync_to(client, policy, 1, str(dtype).removeprefix("torch."))
    sync.push()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    sync.push()
    assert sync.version.endswith("-sync2")
    loaded = server.worker.model.loaded  # its digests are the trainer's
    assert ("lm_head.weight" in loaded) == (head == "untied")
    assert loaded["model.embed_tokens.weight"].dtype == dtype
    assert loaded["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float32
