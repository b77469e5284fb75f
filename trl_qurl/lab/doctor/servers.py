"""The lines that need a server: training with it, and what goes wrong while weights are on their way.

A server may run on another GPU than the trainer, or on the CPU. Its GPU is an argument, as CUDA_VISIBLE_DEVICES names
it; the trainer's GPU is the one that this process sees.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.doctor.lines import Line, failed, ok
from trl_qurl.lab.doctor.policy import build_policy, build_trainer, save_policy
from trl_qurl.lab.doctor.training import KEPT, describe_probe, describe_training
from trl_qurl.lab.processes import last_lines
from trl_qurl.quantization.formats import UNQUANTIZED, parse_scheme
from trl_qurl.rollout.errors import RolloutError

if TYPE_CHECKING:
    from trl_qurl import QuRLGRPOTrainer

START_SECONDS = 150.0  # that a server may take to start
FAULT_SECONDS = 30.0  # that a trainer may take to notice a dead server

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

SMALL = (
    "--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "64M",
    "--gpu-memory-utilization", "0.3",
)  # fmt: skip
"""Options of a server that leaves room for a trainer on the same device."""
LARGE_SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""Of a policy with 0.67 billion parameters: 1.3 GB in 16 bits, so that both of vLLM's buffers of 1 GB are used."""


def train_with_files(argument: str) -> Iterator[Line]:
    """A server that gets its weights as checkpoints, on the trainer's own device."""
    scheme, _, device = argument.partition("@")
    with serve(scheme, device, SMALL) as url:
        yield _trained("server", build(scheme, url, weight_sync="checkpoint"))


def train_with_stream(argument: str) -> Iterator[Line]:
    """Weights over NCCL: three steps, then the order of streams, then a server that dies."""
    scheme, _, device = argument.partition("@")
    with serve(scheme, device, SMALL) as url:
        trainer = build(scheme, url, weight_sync="stream", vllm_request_timeout=FAULT_SECONDS)
        yield _trained("stream", trainer)
        yield compare_after_change(trainer)
        yield kill_during_stream(trainer, url)


def sync_large_policy(argument: str) -> Iterator[Line]:
    """The first sync of more than one buffer, to a server with the settings of `trl-qurl serve` alone."""
    _, _, device = argument.partition("@")
    policy = build_policy(**LARGE_SIZES)
    with serve(UNQUANTIZED, device, (), policy) as url:
        trainer = build(UNQUANTIZED, url, policy, weight_sync="stream")
        trainer.vllm_generation.sync_weights()
        sent = trainer.vllm_generation.pop_cost().sent_bytes
        yield ok("server-memory", f"a server with default settings took {sent / 1e9:.1f} GB at its first sync")


def build(scheme: str, url: str, policy: Any = None, **changed: Any) -> QuRLGRPOTrainer:
    """A trainer whose rollouts come from a server."""
    served: dict[str, Any] = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": FAULT_SECONDS}
    trainer = build_trainer(parse_scheme(scheme), policy, **served, **changed)
    KEPT.append(trainer)
    return trainer


def compare_after_change(trainer: QuRLGRPOTrainer) -> Line:
    """Change the weights behind a queue of slow work, stream at once, and compare what arrived with what they are.

    vLLM's producer copies tensors on streams of its own. Where these do not wait for the stream of the optimizer, they
    copy weights that are about to change, and the digests of both ends agree on them.
    """
    import torch

    from trl_qurl.quantization.weight_stream import WeightStream, model_parameters
    from trl_qurl.rollout.checks.tensors import compare_digests, tensor_digest
    from trl_qurl.rollout.engine.interface import WeightUpdate
    from trl_qurl.rollout.sync import announce

    model = trainer.model
    engine: Any = trainer.vllm_generation.engine
    weights: WeightStream = trainer.vllm_generation.weights
    dtype = getattr(torch, engine.describe().dtype)
    announced = announce(model_parameters(model), weights, dtype)
    metadata = [entry for entries in announced.values() for entry in entries]
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        slow = torch.randn(8192, 8192, device=model.device)
        for _ in range(50):
            slow = (slow @ slow).tanh()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    update = WeightUpdate("doctor-order", digest=True)
    [received, *_] = engine.load_stream(weights.tensors(model_parameters(model), dtype=dtype), metadata, update)
    if on_gpu:
        torch.cuda.synchronize()
    current = weights.tensors(model_parameters(model), dtype=dtype)
    compare_digests({name: tensor_digest(tensor) for name, tensor in current}, received)
    return ok("stream-order", f"{len(metadata)} tensors arrived as they were after the change")


def kill_during_stream(trainer: QuRLGRPOTrainer, url: str) -> Line:
    """Kill the server in the middle of a sync: NCCL would wait for ever for a worker that is gone."""
    from trl_qurl.rollout.sync import RolloutCost

    generation = trainer.vllm_generation

    def parameters() -> Iterator[tuple[str, Any]]:
        for index, item in enumerate(generation.policy_parameters()):
            if index == 1:
                os.killpg(SERVERS[url].pid, signal.SIGKILL)
            yield item

    started = time.monotonic()
    try:
        generation.sync.push(parameters, RolloutCost())
    except (RolloutError, RuntimeError, OSError) as error:
        seconds = time.monotonic() - started
        return ok("stream-fault", f"ended after {seconds:.0f} s with: {error}", seconds=seconds)
    return failed("stream-fault", "a sync to a server that was killed reported success.")


def _trained(line: str, trainer: QuRLGRPOTrainer) -> Line:
    trainer.train()
    rows = [row for row in trainer.state.log_history if "time/sync_s" in row]
    trained, probed = describe_training(line, rows, len(rows)), describe_probe(line, rows)
    return ok(line, f"{trained.text}; probe {probed.text}", **trained.data, **probed.data)


SERVERS: dict[str, subprocess.Popen[bytes]] = {}
"""Servers of this process by their URL; each leads a group of its own."""


@contextmanager
def serve(scheme: str, device: str, arguments: tuple[str, ...], policy: Any = None) -> Iterator[str]:
    """`trl-qurl serve` with a tiny policy, healthy inside the block; its URL."""
    import requests

    directory = Path(tempfile.mkdtemp(prefix="trl-qurl-doctor-"))
    save_policy(policy if policy is not None else build_policy(), directory / "model")
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", directory / "server.log"
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"CUDA_VISIBLE_DEVICES": device, "TRL_QURL_CACHE": str(directory / "cache")}
    command = [sys.executable, "-m", "trl_qurl.lab.processes"]  # it ends with this process
    command += [sys.executable, "-m", "trl_qurl", "serve", str(directory / "model"), "--scheme", scheme]
    command += ["--port", str(port), *arguments]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
    SERVERS[url] = server
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(requests.RequestException):
                if requests.get(f"{url}/health", timeout=5).ok:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                found = "ended" if server.poll() is not None else f"did not start within {START_SECONDS:.0f} s"
                raise RuntimeError(f"The server {found}. Its last lines: {last_lines(log, 5)}")
            time.sleep(0.5)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
