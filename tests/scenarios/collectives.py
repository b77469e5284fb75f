"""The rollout side of a trainer in several processes, with its server failing at each request in
turn.

Trainer, backend, sync and client are real. Only the server is not: it answers from memory. Prints
how each case ended, in all processes alike or not (`Recorder`).
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from recorder import PATIENCE, Recorder
from short_runs import BASE, letters, texts
from tiny import KEPT, stream_of, tiny_model, tiny_tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl.generation.vllm_client import VLLMClient

from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
from trl_qurl.quantization import SCHEMES
from trl_qurl.quantization.plan import fingerprint
from trl_qurl.rollout import backend, routes, sync
from trl_qurl.rollout.engine.served import ServedEngine
from trl_qurl.rollout.errors import ServerError
from trl_qurl.rollout.routes import stream_metadata
from trl_qurl.rollout.wire import FRESH, WORKER_EXTENSION, EngineDescription

SETTINGS = {
    **{name: value for name, value in BASE.items() if name != "vllm_engine_kwargs"},
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "learning_rate": 0.0,  # so that the server's model is always the policy
    "save_strategy": "steps",
    "save_steps": 1,
    "save_only_model": True,  # transformers loads no optimizer in several processes without a GPU
    "sync_check_interval": 1,
    "vllm_mode": "server",
    "vllm_server_base_url": "http://in.memory",
    "vllm_server_timeout": 0.01,
    "vllm_request_timeout": 5.0,
}
CONFIG = {
    "parallel_config": {"worker_extension_cls": WORKER_EXTENSION},
    "weight_transfer_config": {},
}
CONFIG["model_config"] = {"logprobs_mode": "processed_logprobs"}


class Server:
    """What a server says, until it fails at the request of a number."""

    def __init__(self, rank: int) -> None:
        self.description = EngineDescription(64, "float32", max_lora_rank=rank)
        self.model, self.base = small().eval(), None
        stream = stream_of(self.model, SCHEMES["int8"])
        shapes = {name: shape for name, _, shape in stream_metadata(stream)}
        self.fingerprint = fingerprint(stream.plan.schemes, shapes)
        self.said = {}
        self.plan("nothing")
        self.version = FRESH

    def plan(self, fault: str, number: int = 0) -> None:
        self.fault, self.number, self.asked, self.is_up = fault, number, [], True
        self.open_stream()

    def open_stream(self) -> None:
        self.arrived = threading.Semaphore(0)  # tensors of a stream

    def answer(self, path: str, body: dict) -> dict:
        self.asked.append(body["method"] if path == "/collective_rpc" else path)
        number = len(self.asked)
        if number == self.number or (self.fault == "fails twice" and number == self.number + 1):
            if self.fault == "talks nonsense":
                return {}
            self.version = FRESH
            if self.fault != "restarts":
                self.is_up = self.fault != "is lost"
                raise ServerError("It failed.", status=500)
        if path == "/collective_rpc":
            return {"results": [self.call(**body)]}
        if path == "/v1/completions":
            return {"choices": list(self.choices(**body))}
        return {"data": [{"id": "model"}], "success": True, "vllm_config": CONFIG}

    def call(self, method: str, kwargs: dict) -> object:
        if method == "load_rollout_weights" and kwargs["update"]["metadata"]:
            arrived = self.arrived
            for _ in kwargs["update"]["metadata"]:
                assert arrived.acquire(timeout=20)
        self.version = kwargs.get("update", {"version": self.version})["version"]
        return {
            "describe_config": CONFIG,
            "describe_rollouts": self.description._asdict(),
            "starting_fingerprint": self.fingerprint,
            "rollout_version": self.version,
            "digest_rollout_base": self.base,
            "compare_rollout_digests": "0.0",
        }.get(method)

    def choices(
        self, prompt: list[list[int]], n: int, max_tokens: int, logprobs: int, **kwargs: object
    ):
        for start in prompt:
            key = (tuple(start), max_tokens, logprobs)
            if key not in self.said:
                self.said[key] = self.continued(start, max_tokens, max(1, logprobs))
            yield from [self.said[key]] * n

    @torch.no_grad()
    def continued(self, start: list[int], steps: int, top: int) -> dict:
        tokens, rows = list(start), []
        for _ in range(steps):
            row = self.model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            rows.append(
                {f"token_id:{token}": row[token].item() for token in row.topk(top).indices.tolist()}
            )
            tokens.append(int(row.argmax()))
        said = {
            "tokens": [next(iter(row)) for row in rows],
            "token_logprobs": [max(row.values()) for row in rows],
        }
        said["top_logprobs"] = rows
        return {"prompt_token_ids": start, "token_ids": tokens[len(start) :], "logprobs": said}


class Client(ServedEngine):
    """The real client, whose requests a `Server` answers."""

    server: Server

    def _is_healthy(self) -> bool:
        return self.server.is_up

    def _answer(self, verb, path, json=None, **kwargs):
        return self.server.answer(path, json)

    def check_base(self, sent):
        self.server.base = sent
        super().check_base(sent)


def join(client, device) -> None:
    """Open a group in place of NCCL's, which needs GPUs."""
    client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": {}})
    client.server.open_stream()
    client.communicator = SimpleNamespace(
        broadcast=lambda tensor, src, stream: client.server.arrived.release(),
        destroy=lambda: None,
        group=SimpleNamespace(),
    )


def no_cuda_stream() -> SimpleNamespace:
    return SimpleNamespace(synchronize=lambda: None)


class Case:
    """A policy in several processes, and a way to its server."""

    def __init__(self, out: Path, kind: str, route: str, recorder: Recorder) -> None:
        self.out, self.kind, self.route, self.recorder = out, kind, route, recorder
        self.is_main = dist.get_rank() == 0
        Client.server = self.server = Server(rank=8 * (route == "adapter"))
        self.outcomes: dict[str, str] = {}

    def check(
        self, name: str, act: Callable[[], object], fault: str = "nothing", number: int = 0
    ) -> list[str]:
        """Record how something ends, with a server that has this fault; what it asks the server
        for.
        """
        self.server.plan(fault, number)
        end = self.recorder.run(name, act)
        asked, was_lost = self.server.asked, not self.server.is_up
        self.server.plan("nothing")
        if was_lost and self.is_main:
            self.trainer.vllm_generation.vllm_client.reconnect(1.0)
        asked = self.recorder.share(name, asked)
        # There may be fewer requests than in a sound rollout.
        self.outcomes |= {name: end} if number <= len(asked) else {}
        return asked

    def start(self) -> None:
        peft_config = None
        if self.kind == "lora":
            from peft import LoraConfig

            peft_config = LoraConfig(r=4, target_modules="all-linear")
        config = SETTINGS | {"weight_sync": "auto" if self.route == "stream" else self.route}
        args = QuRLGRPOConfig(str(self.out), **config | {"bf16": self.kind == "fsdp2"})
        given = {"processing_class": tiny_tokenizer(), "peft_config": peft_config}
        self.trainer = QuRLGRPOTrainer(small(), letters, args, texts(), **given)
        KEPT.append(self.trainer)
        if self.kind == "fsdp2":  # which accelerate turns on for GPUs only
            self.trainer.vllm_generation._dist.fsdp_version = 2
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in [*self.trainer.model.model.layers, self.trainer.model]:
                fully_shard(layer, mesh=mesh)

    def generate(self, length: int) -> None:
        self.trainer.vllm_generation.generate(
            prompts=[[40] * length] * 4, images=None, num_generations=4
        )

    def rollout(self) -> None:
        """A sync, and tokens that it samples."""
        self.trainer.vllm_generation.sync_weights()
        self.generate(2)

    def diverged_rollout(self) -> None:
        """The same, with a policy that has diverged."""
        parameter = next(p for p in self.trainer.model.parameters() if p.requires_grad)
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.fill_(torch.inf)
        try:
            self.rollout()
        finally:
            with torch.no_grad():
                parameter.copy_(before)

    def save(self) -> None:
        self.trainer.save_quantized(self.out / "quantized")

    def train(self) -> None:
        self.trainer.train()
        self.trainer.save_model(str(self.out / "model"))

    def resume(self) -> None:
        self.start()
        self.trainer.train(resume_from_checkpoint=str(self.out / "checkpoint-1"))


def small() -> torch.nn.Module:
    return tiny_model(num_hidden_layers=1)


def run(case: Case, faults: list[str]) -> None:
    """A start, a rollout and saving; then one fault after another."""
    at_start, rollout = case.check("starts", case.start), case.check("rolls out", case.rollout)
    case.check("saves", case.save)
    for fault in faults:
        for number, request in enumerate(rollout, 1):
            case.check(f"rollout, {fault}: {number}, {request}", case.rollout, fault, number)
    case.check("long prompt of the main process", lambda: case.generate(70 if case.is_main else 2))
    case.check("long prompt of another process", lambda: case.generate(2 if case.is_main else 70))
    case.check("a weight that is infinite", case.diverged_rollout)
    full = OSError("No space left on device")
    writers = ("quantization.checkpoint.CheckpointWriter.write", "rollout.routes.write_adapter")
    with ExitStack() as patches:
        for writer in writers:
            patches.enter_context(mock.patch(f"trl_qurl.{writer}", side_effect=full))
        case.check("full disk", case.rollout if case.route != "stream" else case.save)
    for number, request in enumerate(at_start, 1):
        case.check(f"start, fails: {number}, {request}", case.start, "fails", number)
    if case.route == "stream":
        refused = mock.patch("socket.create_server", side_effect=OSError("Address already in use"))
        with refused if case.is_main else nullcontext():
            case.check("port in use", case.start)


def run_and_resume(case: Case) -> None:
    case.check("starts", case.start)
    case.check("trains", case.train)
    case.check("resumes", case.resume)
    if not case.is_main:
        (case.out / "checkpoint-1" / "rollout_state_1.pt").unlink()
    case.check("resumes without one process's state", case.resume)


def plant(case: Case) -> None:
    """Faults of ours, one at a time, each in one process."""
    parameters, require = routes.model_parameters, sync.WeightSync.require_version
    planted = {
        "an error is kept": (False, "routes.raise_everywhere", lambda act, *rest, **join: act(), 1),
        "a tensor is not read": (
            False,
            "routes.model_parameters",
            lambda *args: islice(parameters(*args), 9),
            0,
        ),
        "a broadcast more": (
            True,
            "sync.WeightSync.require_version",
            lambda self: (dist.barrier(), require(self)),
            0,
        ),
        "the stream is left": (True, "routes.deque", lambda *args, **kwargs: None, 1),
    }
    case.check("starts", case.start)
    for name, (in_main, target, fault, number) in planted.items():
        with (
            mock.patch(f"trl_qurl.rollout.{target}", fault)
            if case.is_main == in_main
            else nullcontext()
        ):
            case.check(name, case.rollout, "fails", number)


def main(out: Path, kind: str, route: str, *faults: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
    groups = dist.PrefixStore("groups", store)
    dist.init_process_group("gloo", store=groups, rank=rank, world_size=size, timeout=PATIENCE)
    recorder = Recorder(dist.PrefixStore("recorder", store.clone()))
    case = Case(out, kind, route, recorder)
    with ExitStack() as patches:
        patches.enter_context(
            mock.patch.object(backend.QuantizedVLLMGeneration, "_engine_class", Client)
        )
        patches.enter_context(mock.patch.object(torch.cuda, "Stream", no_cuda_stream))
        patches.enter_context(mock.patch.object(VLLMClient, "init_communicator", join))
        if route == "stream":
            patches.enter_context(
                mock.patch.object(backend, "choose_route", lambda *args: ("stream", "a test"))
            )
        patches.enter_context(recorder)
        if faults in (("planted",), ("resumed",)):
            (plant if faults == ("planted",) else run_and_resume)(case)
        else:
            run(case, list(faults))
    dist.barrier()  # the main process has the store
    if rank == 0:
        print("RECORD " + json.dumps({"outcomes": case.outcomes, "collectives": recorder.total}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
