"""The line that requires a server: training with `trl-qurl serve` on the trainer's device, weights sent as files."""

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

from trl_qurl.lab.doctor.lines import Line, ok
from trl_qurl.lab.doctor.policy import build_policy, build_trainer, save_policy
from trl_qurl.lab.doctor.training import LIVE_TRAINERS, describe_probe, describe_training
from trl_qurl.lab.processes import last_lines
from trl_qurl.quantization.formats import parse_scheme

START_SECONDS = 150.0  # time limit for starting a server
ANSWER_SECONDS = 30.0  # trainer's timeout for a server that has started

SMALL = (
    "--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "64M",
    "--gpu-memory-utilization", "0.3",
)  # fmt: skip
"""Server options that leave room for a trainer on the same device."""


def train_with_server(scheme: str) -> Iterator[Line]:
    """Train with a server that receives its weights as checkpoints."""
    with serve(scheme) as url:
        trainer = build_trainer(
            parse_scheme(scheme),
            vllm_mode="server",
            vllm_server_base_url=url,
            vllm_server_timeout=ANSWER_SECONDS,
            weight_sync="checkpoint",
        )
        LIVE_TRAINERS.append(trainer)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "time/sync_s" in row]
        trained, probed = describe_training("server", rows, len(rows)), describe_probe("server", rows)
        yield ok("server", f"{trained.text}; probe {probed.text}", **trained.data, **probed.data)


@contextmanager
def serve(scheme: str) -> Iterator[str]:
    """Run `trl-qurl serve` with a tiny policy, and yield its URL once it is healthy."""
    import requests

    directory = Path(tempfile.mkdtemp(prefix="trl-qurl-doctor-"))
    save_policy(build_policy(), directory / "model")
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", directory / "server.log"
    environment = os.environ | {"TRL_QURL_CACHE": str(directory / "cache")}
    command = [sys.executable, "-m", "trl_qurl.lab.processes"]  # stops the server when this process ends
    command += [sys.executable, "-m", "trl_qurl", "serve", str(directory / "model"), "--scheme", scheme]
    command += ["--port", str(port), *SMALL]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(requests.RequestException):
                if requests.get(f"{url}/health", timeout=5).ok:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                fault = "exited" if server.poll() is not None else f"did not start within {START_SECONDS:.0f} s"
                raise RuntimeError(f"The server {fault}. Its last output lines: {last_lines(log, 5)}")
            time.sleep(0.5)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def free_port() -> int:
    """Find a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
