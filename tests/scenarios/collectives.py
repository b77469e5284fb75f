"""The rollout side of a trainer in several processes, with its server failing at each request in
turn.

Trainer, backend, sync and client are real. Only the server is not: it answers from memory. Prints
how each case ended, in all processes alike or not (`Recorder`).
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from child import print_record
from peft import LoraConfig
from recorder import PATIENCE, Recorder
from short_runs import BASE, letters, texts
from support.fake_server import URL, FakeServer, NoStream
from tiny import KEPT, tiny_model, tiny_tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trl.generation.vllm_client import VLLMClient

from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
from trl_qurl.quantization import write_checkpoint
from trl_qurl.rollout import routes
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.errors import ServerError

SETTINGS = {
    **BASE,
    "vllm_engine_kwargs": {},  # a server has its own
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "learning_rate": 0.0,  # so that the server's model is always the policy
    "save_strategy": "steps",
    "save_steps": 1,
    "save_only_model": True,  # transformers loads no optimizer in several processes without a GPU
    "sync_check_interval": 1,
    "vllm_mode": "server",
    "vllm_server_base_url": URL,
    "vllm_server_timeout": 0.01,
    "vllm_request_timeout": 5.0,
}


class Faults:
    """What happens to a server at the request of a number."""

    def __init__(self, server):
        self.server = server
        self.plan("nothing")
        server.before_answer = self.before_answer

    def plan(self, fault, number=0):
        self.fault = fault
        self.number = number
        self.server.forget()
        self.server.asked = []
        self.server.is_up = True

    def before_answer(self, asked):
        number = len(self.server.asked)
        if number == self.number or (self.fault == "fails twice" and number == self.number + 1):
            if self.fault == "talks nonsense":
                return {}
            self.server.restart()
            if self.fault != "restarts":
                self.server.is_up = self.fault != "is lost"
                raise ServerError("It failed.", status=500)
        return None


def join(client, device):
    """Open a group in place of NCCL's, which needs GPUs."""
    client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": {}})
    client.server.connect(client)


class Case:
    """A policy in several processes, and a way to its server."""

    def __init__(self, out, kind, route, recorder):
        self.out = out
        self.kind = kind
        self.route = route
        self.recorder = recorder
        self.is_main = dist.get_rank() == 0
        started = out / f"started-{dist.get_rank()}"
        policy = small().eval()
        write_checkpoint(policy, None, "int8", started)
        self.server = FakeServer(started, rank=8 * (route == "adapter"), policy=policy)
        self.faults = Faults(self.server)
        self.outcomes = {}

    def check(self, name, act, fault="nothing", number=0):
        """Record how something ends, with a server that has this fault; what it asks the server
        for.
        """
        self.faults.plan(fault, number)
        end = self.recorder.run(name, act)
        asked = self.server.asked
        was_lost = not self.server.is_up
        self.faults.plan("nothing")
        if was_lost and self.is_main:
            self.trainer.vllm_generation.vllm_client.reconnect(1.0)
        asked = self.recorder.share(name, asked)
        if number <= len(asked):  # there may be fewer requests than in a sound rollout
            self.outcomes[name] = end
        return asked

    def start(self):
        peft_config = None
        if self.kind == "lora":
            peft_config = LoraConfig(r=4, target_modules="all-linear")
        settings = SETTINGS | {
            "weight_sync": "auto" if self.route == "stream" else self.route,
            "bf16": self.kind != "ddp",
        }
        self.trainer = QuRLGRPOTrainer(
            small(),
            letters,
            QuRLGRPOConfig(str(self.out), **settings),
            texts(),
            processing_class=tiny_tokenizer(),
            peft_config=peft_config,
        )
        KEPT.append(self.trainer)
        if self.kind == "fsdp2":  # which accelerate turns on for GPUs only
            self.trainer.vllm_generation._dist.fsdp_version = 2
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in [*self.trainer.model.model.layers, self.trainer.model]:
                fully_shard(layer, mesh=mesh)

    def generate(self, length):
        self.trainer.vllm_generation.generate(
            prompts=[[40] * length] * 4, images=None, num_generations=4
        )

    def rollout(self):
        """A sync, and tokens that it samples."""
        self.trainer.vllm_generation.sync_weights()
        self.generate(2)

    def diverged_rollout(self):
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

    def save(self):
        self.trainer.save_quantized(self.out / "quantized")

    def train(self):
        self.trainer.train()
        self.trainer.save_model(str(self.out / "model"))

    def resume(self):
        self.start()
        self.trainer.train(resume_from_checkpoint=str(self.out / "checkpoint-1"))


def small():
    return tiny_model(num_hidden_layers=1)


def run(case, faults):
    """A start, a rollout and saving; then one fault after another."""
    at_start = case.check("starts", case.start)
    rollout = case.check("rolls out", case.rollout)
    case.check("saves", case.save)
    for fault in faults:
        for number, request in enumerate(rollout, 1):
            case.check(f"rollout, {fault}: {number}, {request}", case.rollout, fault, number)
    case.check("long prompt of the main process", lambda: case.generate(70 if case.is_main else 2))
    case.check("long prompt of another process", lambda: case.generate(2 if case.is_main else 70))
    case.check("a weight that is infinite", case.diverged_rollout)
    full = OSError("No space left on device")
    write = "trl_qurl.quantization.checkpoint.CheckpointWriter.write"
    files = mock.patch(write, side_effect=full)
    adapters = mock.patch("trl_qurl.rollout.routes.write_adapter", side_effect=full)
    with files, adapters:
        case.check("full disk", case.save if case.route == "stream" else case.rollout)
    for number, request in enumerate(at_start, 1):
        case.check(f"start, fails: {number}, {request}", case.start, "fails", number)
    if case.route == "stream":
        refused = mock.patch("socket.create_server", side_effect=OSError("Address already in use"))
        with refused if case.is_main else nullcontext():
            case.check("port in use", case.start)


def run_and_resume(case):
    case.check("starts", case.start)
    case.check("trains", case.train)
    # which a checkpoint of the model alone lacks
    case.check("saves", lambda: case.trainer._save_rest(case.out / "checkpoint-1"))
    case.check("resumes", case.resume)
    if not case.is_main:
        (case.out / "checkpoint-1" / "rollout_state_1.pt").unlink()
    case.check("resumes without one process's state", case.resume)


def main(out, kind, route, *faults):
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
    groups = dist.PrefixStore("groups", store)
    dist.init_process_group("gloo", store=groups, rank=rank, world_size=size, timeout=PATIENCE)
    recorder = Recorder(dist.PrefixStore("recorder", store.clone()))
    case = Case(out, kind, route, recorder)
    # This process ends with the case, so nothing has to be restored.
    QuantizedVLLMGeneration._engine_class = case.server.client_class()
    torch.cuda.Stream = NoStream
    VLLMClient.init_communicator = join
    if route == "stream":
        routes.choose_route = lambda *args: ("stream", "a test")
    with recorder:
        if faults == ("resumed",):
            run_and_resume(case)
        else:
            run(case, list(faults))
    dist.barrier()  # the main process has the store
    print_record({"outcomes": case.outcomes, "collectives": recorder.total})


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
