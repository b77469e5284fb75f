"""Streaming to a server: what is announced, sent, received and digested, with a stand-in for NCCL.

The two ends are real: our client with its sender, our worker with its receiver and vLLM's NCCL
engine, which opens the group. Between them, two threads hand tensors over in memory instead of two
GPUs.
"""

import functools
import json
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import requests
import torch
from conftest import free_port
from peft import LoraConfig, get_peft_model
from support.handover import HandedOver, NoStream
from support.training import MOVED, SAME
from tiny import WHOLE_BLOCKS, layers_of, rollout_settings, stream_of, tiny_model
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.utils.network_utils import get_ip

from trl_qurl.quantization import SCHEMES, make_plan, write_checkpoint
from trl_qurl.quantization.plan import QuantizationPlan
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.quantization.uaq import scale_model_
from trl_qurl.rollout.checks.tensors import MeteredStream
from trl_qurl.rollout.engine import served
from trl_qurl.rollout.engine.broadcast import Broadcast
from trl_qurl.rollout.engine.colocated import ColocatedEngine
from trl_qurl.rollout.engine.served import ServedEngine
from trl_qurl.rollout.errors import ServerError, ServerLostError, SyncError
from trl_qurl.rollout.preparation import choose_route
from trl_qurl.rollout.routes import StreamRoute, stream_metadata
from trl_qurl.rollout.sync import RolloutCost, WeightSync
from trl_qurl.rollout.wire import WORKER_EXTENSION, EngineDescription, WeightUpdate

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op`:FutureWarning")

INT8, FP8 = SCHEMES["int8"], SCHEMES["fp8"]


def parameters(model):
    return ((name, parameter.data) for name, parameter in model.named_parameters())


def stream(model, scheme, dtype=None):
    return stream_of(model, scheme).tensors(parameters(model), dtype=dtype)


def announced(model, scheme, dtype=None):
    return stream_metadata(stream_of(model, scheme), dtype)


# What is announced
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [INT8, FP8, None], ids=["int8", "fp8", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_announced_is_what_comes(scheme, dtype):
    model = tiny_model(dtype=dtype)
    metadata = announced(model, scheme)
    sent = list(stream(model, scheme))
    assert metadata == [(name, str(t.dtype).split(".")[1], list(t.shape)) for name, t in sent]
    if scheme is INT8:
        layer = metadata.index(("model.layers.0.mlp.up_proj.weight", "int8", [128, 128]))
        assert metadata[layer + 1] == (
            "model.layers.0.mlp.up_proj.weight_scale",
            str(dtype).removeprefix("torch."),
            [128, 1],
        )


@pytest.mark.parametrize("scheme", [INT8, None], ids=["int8", "bf16"])
def test_what_is_not_quantized_is_sent_in_the_engines_dtype(scheme):
    model = tiny_model(dtype=torch.float32)
    layers = layers_of(model)
    metadata = announced(model, scheme, torch.bfloat16)
    sent = dict(stream(model, scheme, torch.bfloat16))
    assert metadata == [
        (name, str(t.dtype).split(".")[1], list(t.shape)) for name, t in sent.items()
    ]
    assert sent["model.embed_tokens.weight"].dtype == torch.bfloat16
    as_it_is = dict(stream(model, scheme))
    for name, tensor in sent.items():
        quantized = (
            name.removesuffix("_scale").removesuffix(".weight") in layers and scheme is not None
        )
        is_vector = tensor.dim() < 2  # which an engine may hold in 32 bits
        assert tensor.dtype == (as_it_is[name].dtype if quantized or is_vector else torch.bfloat16)
        assert torch.equal(tensor, as_it_is[name].to(tensor.dtype)), (
            "an engine would have cast it to the same bits"
        )


# From end to end
# --------------------------------------------------------------------------------------------------


class Loading(torch.nn.Module):
    """A model that only keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.loaded = {}

    def load_weights(self, weights):
        self.loaded.update((name, tensor.clone()) for name, tensor in weights)


@pytest.fixture
def ends(monkeypatch):
    """A client and the worker it reaches, with a hand-over in place of NCCL and nothing in place of
    CUDA streams.
    """
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    from trl_qurl.rollout.engine.worker import RolloutWorker

    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    between = HandedOver()
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0),
        model_config=SimpleNamespace(model=""),
        quant_config=None,
    )

    class Worker(RolloutWorker):
        def __init__(self):
            self.vllm_config = config
            self.model = Loading()
            engine = NCCLWeightTransferEngine(None, config, torch.device("cpu"), self.model)
            engine.model_update_group = between.receiver()
            self.weight_transfer_engine = engine
            self.reloads = 0

        def get_model(self):
            return self.model

        def reload_weights(self, weights_iterator):
            self.reloads += 1
            self.model.load_weights(weights_iterator)

    worker = Worker()
    client = ServedEngine.__new__(ServedEngine)  # without the connection that its constructor makes
    client.communicator, client._failure, client.worker = between.sender(), None, worker
    client._info = None
    client.base_url, client._broadcast = "http://of.the.worker", None
    client.requests = []

    def answer(verb, path, json=None):
        client.requests.append(path)
        if path == "/collective_rpc":
            try:
                return {"results": [getattr(client.worker, json["method"])(**json["kwargs"])]}
            except RuntimeError as error:
                raise ServerError(str(error)) from None
        return {"success": True}

    client._answer = answer
    return client, worker


@pytest.mark.parametrize("scheme", [INT8, FP8, None], ids=["int8", "fp8", "bf16"])
def test_tensors_arrive_in_order_and_bit_for_bit(scheme, ends):
    client, worker = ends
    model = tiny_model(dtype=torch.bfloat16)
    metadata = announced(model, scheme)
    sent = MeteredStream(stream(model, scheme), {})
    client.load_stream(sent, WeightUpdate("v1", True, metadata))
    assert len(worker.rollout_digests) == len(metadata)
    client.compare_digests(sent.digests)
    expected = dict(stream(model, scheme))
    assert list(worker.model.loaded) == list(expected)
    for name, tensor in worker.model.loaded.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(
            tensor.view(torch.uint8), expected[name].contiguous().view(torch.uint8)
        ), name
    assert worker.reloads == 1
    assert client.requests == [
        "/collective_rpc",
        "/reset_prefix_cache",
        "/reset_encoder_cache",
        "/collective_rpc",
    ]
    assert client.version() == "v1"
    client.load_stream(stream(model, scheme), WeightUpdate("v2", False, metadata))
    assert client.version() == "v2" and worker.rollout_digests == {}


def test_any_layout_and_dtype_arrives(ends):
    """NCCL sends memory as it lies, and has no name for some dtypes of formats."""
    client, worker = ends
    sent = {
        "transposed": torch.arange(6, dtype=torch.int32).view(2, 3).t(),
        "scalar": torch.tensor(3.5),
        "exponents": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "a part": torch.arange(8, dtype=torch.bfloat16)[3:5],
        "nothing": torch.empty(0, 4),
    }
    metadata = [(name, str(t.dtype).split(".")[1], list(t.shape)) for name, t in sent.items()]
    client.load_stream(sent.items(), WeightUpdate("v1", False, metadata))
    assert list(worker.model.loaded) == list(sent)
    for name, tensor in worker.model.loaded.items():
        assert tensor.dtype == sent[name].dtype and tensor.shape == sent[name].shape
        assert torch.equal(tensor.float(), sent[name].float()), name


def test_int8_halves_the_bytes_of_the_layers():
    model = tiny_model(dtype=torch.bfloat16)
    layers = layers_of(model)
    sizes = {}
    for scheme in (INT8, None):
        sizes[scheme] = sum(
            t.nbytes for name, t in stream(model, scheme) if name.split(".weight")[0] in layers
        )
    scales = sum(
        2 * t.shape[0] for name, t in parameters(model) if name.removesuffix(".weight") in layers
    )
    assert sizes[INT8] == sizes[None] / 2 + scales


def test_a_server_that_refuses_says_why_and_nobody_hangs(ends):
    client, worker = ends
    model = tiny_model()
    metadata = announced(model, INT8)

    def refuse(weights_iterator):
        raise RuntimeError("no reload here")

    worker.reload_weights = refuse
    with ThreadPoolExecutor(1) as executor:
        outcome = executor.submit(
            client.load_stream, stream(model, INT8), WeightUpdate("v1", True, metadata)
        )
        with pytest.raises(ServerError, match="no reload here"):
            outcome.result(timeout=20)
    assert client._broadcast.wait(5.0), "a run that recovers opens another one"
    # Half loaded, vLLM cannot be loaded again; whoever tries is told.
    with pytest.raises(
        RuntimeError, match="An earlier load of weights failed halfway.*restart the engine"
    ):
        worker.load_rollout_weights({"version": "v2"}, weights_iterator=iter(()))


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
    early = pytest.raises(SyncError, match="stopped receiving before the last tensor was sent")
    with early if are_done == "too early" else nullcontext():
        broadcast.send(tensors(), request)
    assert broadcast.wait(5.0)


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["int8", "w4a16"])
def test_a_real_engine_computes_with_what_it_received(name, run_scenario, tmp_path):
    record = run_scenario("streamed.py", tmp_path, name)
    assert record["version"] == ["v1"]
    assert record["streamed"] == pytest.approx(record["fresh"], abs=SAME)
    assert record["streamed"] != pytest.approx(record["started"], abs=MOVED)


@pytest.mark.parametrize(
    ("makes_digests", "fault"), [(True, r"\d+ different"), (False, r"\d+ missing")]
)
def test_workers_compare_digests(makes_digests, fault, ends):
    client, worker = ends
    model = tiny_model()
    sent = MeteredStream(stream(model, INT8), {})
    client.load_stream(sent, WeightUpdate("v1", True, announced(model, INT8)))
    client.compare_digests(sent.digests)
    other = stream(tiny_model(seed=1), INT8)  # what a worker got that the trainer did not send
    client.load_stream(other, WeightUpdate("v2", makes_digests, announced(model, INT8)))
    with pytest.raises(SyncError, match=rf"of {len(sent.digests)} tensors, {fault}"):
        client.compare_digests(sent.digests)


def test_a_broadcast_that_never_returns_ends_the_run_in_time(ends, monkeypatch):
    """As to a worker that died inside NCCL: what it waits for never comes, and not even an abort
    calls it back.
    """
    client, worker = ends
    forever = threading.Event()
    group = SimpleNamespace(store=None, socket=None)
    client.communicator = SimpleNamespace(
        broadcast=lambda tensor, src, stream: forever.wait(), destroy=lambda: None, group=group
    )
    monkeypatch.setattr(served, "BROADCAST_GRACE", 0.1)

    def answer(verb, path, **kwargs):
        time.sleep(0.5)
        raise ServerError("The vLLM server did not answer /collective_rpc within 0.5 seconds.")

    client._answer = answer
    model = tiny_model()
    try:
        with pytest.raises(ServerError, match="did not answer /collective_rpc"):
            client.load_stream(
                stream(model, INT8), WeightUpdate("v1", False, announced(model, INT8))
            )
        with pytest.raises(
            ServerLostError, match="A broadcast to the server's workers did not end.*did not answer"
        ):
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
        self.group, self.count, self.is_sending, self.aborted = group, 0, False, threading.Event()
        self.device = torch.device("cpu")
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
def rendezvous(ends, monkeypatch):
    """The client of `ends` before it has opened its stream, and a function that starts a server: a
    new worker.
    """
    from vllm.distributed.device_communicators import pynccl

    client, worker = ends
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", OverItsStore)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    client.communicator, client.plan, client.shapes, client.group_port = (
        None,
        QuantizationPlan(),
        {},
        free_port(),
    )
    client.session, client.request_timeout, client._is_healthy = (
        requests.Session(),
        60.0,
        lambda: True,
    )
    answer = client._answer

    def start():
        client.worker = type(worker)()
        client.worker.weight_transfer_engine.model_update_group = None
        return client.worker

    def routed(verb, path, json=None):
        engine = client.worker.weight_transfer_engine
        if path == "/init_weight_transfer_engine":
            client.requests.append(path)
            return engine.init_transfer_engine(engine.parse_init_info(json["init_info"]))
        if path == "/get_world_size":
            return {"world_size": 1}
        method = json and json["method"]
        if method == "describe_config":
            parallel = {"worker_extension_cls": WORKER_EXTENSION}
            return {"results": [{"parallel_config": parallel, "weight_transfer_config": {}}]}
        if method == "describe_rollouts":
            return {"results": [EngineDescription(64, None)._asdict()]}
        return answer(verb, path, json)

    client._answer = routed
    return client, start


@pytest.mark.parametrize("lost", ["between two syncs", "in a broadcast"])
def test_a_stream_is_opened_again_when_its_server_has_come_back(lost, rendezvous):
    client, start = rendezvous
    model = tiny_model()
    metadata = announced(model, INT8)
    worker = start()
    client.open_stream(CUDA)
    client.load_stream(stream(model, INT8), WeightUpdate("v1", False, metadata))
    assert worker.loaded_version == "v1"
    for version in ("v2", "v3"):  # as often as a server is lost
        if lost == "between two syncs":
            worker = start()
        else:
            worker.weight_transfer_engine.model_update_group.broadcast = functools.partial(
                killed, client
            )
        with pytest.raises(ServerError, match="NCCL is not open|killed"):
            client.load_stream(stream(model, INT8), WeightUpdate(version, False, metadata))
        worker = start() if lost == "in a broadcast" else worker
        client.reconnect(5.0)
        sent = MeteredStream(stream(model, INT8), {})
        client.load_stream(sent, WeightUpdate(version, True, metadata))
        client.compare_digests(sent.digests)
        assert worker.loaded_version == client.version() == version
    assert client.requests.count("/init_weight_transfer_engine") == 3


def test_a_stream_waits_until_its_old_port_is_free(rendezvous):
    client, start = rendezvous
    model = tiny_model()
    start()
    client.open_stream(CUDA)
    client.close_communicator()
    # what is left of the group that was lost
    late = socket.create_server((get_ip(), client.group_port))
    threading.Timer(1.0, late.close).start()
    client.reconnect(5.0)
    client.load_stream(stream(model, INT8), WeightUpdate("v1", False, announced(model, INT8)))
    assert client.version() == "v1"


def killed(client, tensor, src):
    """What a worker receives that is lost while the trainer waits inside NCCL, with the next tensor
    at hand.
    """
    while not client.communicator.is_sending or not client._broadcast._ready.full():
        time.sleep(0.001)
    raise RuntimeError("killed")


def test_a_server_that_hangs_while_a_stream_opens_ends_the_run_in_time(rendezvous):
    client, start = rendezvous
    start()
    answer = client._answer

    def hang(verb, path, json=None):
        if path != "/init_weight_transfer_engine":
            return answer(verb, path, json)
        time.sleep(0.3)
        raise ServerError(
            "The vLLM server did not answer /init_weight_transfer_engine within 0.3 seconds."
        )

    client._answer = hang
    started = time.monotonic()
    with pytest.raises(
        ServerLostError, match="NCCL did not open .*weight_sync=.* did not answer /init_weight"
    ):
        client.open_stream(CUDA)
    assert time.monotonic() - started < 3, "it waited for workers that will not come"
    # If nobody joins its group, vLLM closes a descriptor that is another file's by then
    # (`create_tcp_store`).
    torch.distributed.TCPStore(get_ip(), client.group_port, 2, is_master=False, use_libuv=False)


def test_workers_are_not_sent_to_the_group_of_another_run(rendezvous):
    client, start = rendezvous
    start()
    port = client.group_port
    others = torch.distributed.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=False
    )
    with pytest.raises(
        ServerLostError, match=rf"port {port} of \S+: vllm_group_port.*already in use"
    ):
        client.open_stream(CUDA)
    del others
    assert "/init_weight_transfer_engine" not in client.requests
    client.open_stream(CUDA)  # nothing is left of the attempt


def test_tensors_are_made_here_finished_before_they_are_sent_and_kept_until_they_are(
    ends, monkeypatch
):
    """The order that GPUs need: several processes gather in one order on one stream, and the side
    stream waits for it.
    """
    client, worker = ends
    log = []

    def note(event):
        log.append((event, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    placed = []
    monkeypatch.setattr(
        torch.accelerator,
        "set_device_index",
        lambda index: placed.append(threading.current_thread()),
    )
    default = SimpleNamespace(synchronize=lambda: note("finish"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: default)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(NoStream, "synchronize", lambda stream: note("sent"))
    hand_over = client.communicator.broadcast

    def broadcast(tensor, src, stream):
        assert isinstance(stream, NoStream), "the default stream would wait for dead workers"
        note("send")
        hand_over(tensor, src, stream)

    client.communicator.broadcast = broadcast
    model = tiny_model()

    def made():
        for item in stream(model, INT8):
            note("make")
            yield item

    metadata = announced(model, INT8)
    client.load_stream(made(), WeightUpdate("v1", False, metadata))
    here = [event for event, is_here in log if is_here]
    there = [event for event, is_here in log if not is_here]
    assert here == ["make", "finish"] * len(metadata)
    assert there == ["send", "sent"] * len(metadata), "its memory is free after it has been sent"
    assert len(placed) == 2 and threading.main_thread() not in placed, (
        "each thread has its own current device"
    )
    events = [event for event, _ in log]
    for number in range(len(metadata)):
        assert nth(events, "finish", number) < nth(events, "send", number)


def nth(events, event, number):
    """Where an event occurs for the time of this number."""
    return [place for place, each in enumerate(events) if each == event][number]


def test_files_out_of_sight_are_refused_before_anything_is_touched(ends, tmp_path):
    client, worker = ends
    with pytest.raises(
        SyncError, match=f"does not see the files in {tmp_path}; set rollout_checkpoint_dir"
    ):
        client.load_checkpoint(tmp_path, WeightUpdate("v1"))
    assert worker.reloads == 0 and not worker.rollout_load_failed


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_what_a_server_quantizes_is_compared_by_its_checkpoint(scheme, ends, tmp_path):
    """Not by patterns: these may be spelled in many ways, and two lists of one length may mean
    different layers.
    """
    client, worker = ends
    model, head, name = tiny_model(**WHOLE_BLOCKS), "lm_head", scheme.name
    write_checkpoint(
        model, None, name, tmp_path / "start", ignore=[head, "re:.*layers.1.*down_proj"]
    )
    config = json.loads((tmp_path / "start" / "config.json").read_text())["quantization_config"]
    start = SimpleNamespace(model=str(tmp_path / "start"))
    worker.vllm_config = SimpleNamespace(
        model_config=start, quant_config=CompressedTensorsConfig.from_config(config)
    )

    def other(model, *ignore, formats=name):
        client.plan = make_plan(model, formats, ignore)
        client.shapes = {
            name: shape for name, _, shape in stream_metadata(WeightStream(model, client.plan))
        }
        return client._difference()

    assert (
        other(model, head, "model.layers.1.mlp.down_proj")
        == other(model, "re:(lm_head|.*1.mlp.down_proj)")
        == ""
    )
    found = other(model, head, "re:.*layers.0.*down_proj")
    assert (
        f"first model.layers.0.mlp.down_proj.weight_scale (none here and {name}, shape [" in found
    )
    found = other(model, head, "re:.*(layers.1.*down_proj|layers.0.*o_proj)")
    assert (
        f"first model.layers.0.self_attn.o_proj.weight_scale (none here and {name}, shape ["
        in found
    )
    found = other(model, head)
    assert (
        f"first model.layers.1.mlp.down_proj.weight_scale ({name}, shape [" in found
        and "and none there" in found
    )
    other_name = "fp8" if name == "int8" else "int8"
    found = other(
        model,
        head,
        formats={"re:.*layers.1.*down_proj": "none", "re:.*o_proj": other_name, "*": name},
    )
    first = (
        f"first model.layers.0.self_attn.o_proj.weight_scale ({other_name}, shape [128, 1] here "
        f"and {name}, shape ["
    )
    assert first in found and "layers.1" not in found
    deeper, ignored = tiny_model(num_hidden_layers=3, **WHOLE_BLOCKS), "re:.*layers.1.*down_proj"
    assert "first model.layers.2.mlp.down_proj.weight_scale" in other(deeper, head, ignored)
    wider = tiny_model(hidden_size=256, **WHOLE_BLOCKS)
    assert "tensors differ, first model.layers.0.mlp." in other(wider, head, ignored)


def sync_to(client, policy, interval, dtype=None):
    """A sync of a policy to the client's server, with no version to ask for."""
    settings = rollout_settings(INT8, is_served=True, sync_check_interval=interval)
    route = StreamRoute(policy, stream_of(policy, INT8), is_served=True)
    sync = WeightSync(route, settings, RolloutCost(), lambda: 0)
    route.attach(client, dtype)
    client.version = lambda: sync.version
    return sync


def test_every_stream_is_proven_until_a_gpu_has_shown_that_it_need_not_be(ends):
    client, worker = ends
    model = tiny_model()

    def checks(interval):
        sync, proofs, digested = sync_to(client, model, interval), 0, []
        for _ in range(3):
            sync.push()
            proofs += sync.needs_proof
            sync.needs_proof = False
            digested.append(bool(worker.rollout_digests))
        return proofs, digested

    assert checks(16) == (3, [True, True, True])
    assert checks(1) == (3, [True, True, True])
    assert checks(0) == (0, [False, False, False])


def test_a_worker_says_how_its_model_is_quantized(ends, tmp_path):
    client, worker = ends
    client.plan, client.shapes = QuantizationPlan(), {}

    def describe(quant_config):
        worker.vllm_config = SimpleNamespace(
            quant_config=quant_config,
            cache_config=SimpleNamespace(cache_dtype="fp8_e4m3"),
            model_config=SimpleNamespace(model=str(tmp_path), max_model_len=64),
            lora_config=None if quant_config is None else SimpleNamespace(max_lora_rank=16),
        )
        return client.describe()

    # in 32 bits, as vLLM's kernels need it
    quantized = torch.nn.ParameterDict({"weight_scale": torch.zeros(1)})
    quantized.scheme = object()
    norm = torch.nn.ParameterDict({"weight": torch.zeros(2, dtype=torch.bfloat16)})
    worker.model = torch.nn.ModuleDict({"linear": quantized, "norm": norm})
    assert describe(None) == EngineDescription(64, dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    worker.model["gate"] = torch.nn.ParameterDict({"weight": torch.zeros(2, dtype=torch.float32)})
    assert describe(None).dtype is None, "what one parameter holds in 32 bits would be sent in 16"
    other = SimpleNamespace(get_name=lambda: "awq")
    assert describe(other).max_lora_rank == 16 and "vLLM's awq there" in client._difference()
    assert len({scheme.served_as for scheme in SCHEMES.values()}) == len(SCHEMES), (
        "two formats that a server mixes up"
    )


# Which way
# --------------------------------------------------------------------------------------------------

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("requested", "device", "obstacle", "is_sharded", "name", "reason"),
    [
        ("auto", CUDA, None, False, "stream", "both have NCCL"),
        ("auto", CUDA, None, True, "checkpoint", "streaming a sharded policy is untested"),
        ("auto", CUDA, "a reason", False, "checkpoint", "a reason"),
        ("auto", CPU, None, False, "checkpoint", "the trainer's is 'cpu'"),
        ("checkpoint", CUDA, None, False, "checkpoint", "weight_sync='checkpoint' requests it"),
        (
            "llmcompressor",
            CUDA,
            None,
            False,
            "llmcompressor",
            "weight_sync='llmcompressor' requests it",
        ),
        ("stream", CUDA, None, False, "stream", "weight_sync='stream' requests it"),
        ("stream", CUDA, None, True, "stream", "weight_sync='stream' requests it"),
    ],
)
def test_how_weights_travel(requested, device, obstacle, is_sharded, name, reason):
    route, why = choose_route(requested, device, obstacle, is_sharded)
    assert route == name and reason in why


@pytest.mark.parametrize(("device", "obstacle"), [(CPU, None), (CUDA, "a reason")])
def test_a_stream_that_cannot_be_is_refused(device, obstacle):
    with pytest.raises(
        ValueError, match=r"weight_sync='stream' is not possible: .* set weight_sync='checkpoint'"
    ):
        choose_route("stream", device, obstacle, is_sharded=False)


@pytest.mark.parametrize("cleared", [True, False])
def test_a_colocated_engine_clears_what_old_weights_cached(cleared):
    llm = MagicMock()
    llm.reset_prefix_cache.return_value = cleared  # False while requests run
    with (
        nullcontext()
        if cleared
        else pytest.raises(SyncError, match="did not clear the prefix cache")
    ):
        ColocatedEngine(llm).load_stream([], WeightUpdate("weights-1"))
    llm.reset_prefix_cache.assert_called_once_with()


@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize("adapter", ["full", "LoRA"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_stream_to_a_server(dtype, adapter, head, ends):
    client, worker = ends
    policy = tiny_model(tie_word_embeddings=head == "tied")
    if adapter == "LoRA":
        policy = get_peft_model(
            policy, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
    else:
        scale_model_(policy, 1.5)
    sync = sync_to(client, policy, 1, str(dtype).removeprefix("torch."))
    sync.push()
    first = sync.version
    before = {name: tensor.clone() for name, tensor in worker.model.loaded.items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    sync.push()
    second = sync.version
    assert [version.split("-")[-1] for version in (first, second)] == ["sync1", "sync2"]
    assert ("lm_head.weight" in before) == (head == "untied")
    assert before["model.embed_tokens.weight"].dtype == dtype
    layer = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[layer], worker.model.loaded[layer])
