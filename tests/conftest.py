"""Processes that tests start: training scenarios, engines and servers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCENARIOS = Path(__file__).parent / "scenarios"

DISTRIBUTED_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What TRL sets for an engine in its own process."""


def child_environment(**extra: str) -> dict[str, str]:
    """One thread per process and no network, whatever the machine; ports that no neighbour has."""
    # An engine in this process leaves its rank behind in the environment; a child has its own.
    inherited = {name: value for name, value in os.environ.items() if name not in DISTRIBUTED_VARIABLES}
    return inherited | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "MASTER_PORT": str(free_port()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **extra,
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def run_scenario() -> Callable[..., Any]:
    """Run a script of tests/scenarios and return the record it prints."""

    def run(script: str, *arguments: object, **environment: str) -> Any:
        command = [sys.executable, str(SCENARIOS / script), *map(str, arguments)]
        finished = subprocess.run(
            command, env=child_environment(**environment), capture_output=True, text=True, timeout=400
        )
        records = [line for line in finished.stdout.splitlines() if line.startswith("RECORD ")]
        assert records, f"{' '.join(command)} failed:\n{finished.stdout[-3000:]}\n{finished.stderr[-6000:]}"
        return json.loads(records[-1].removeprefix("RECORD "))

    return run


@contextmanager
def vllm_server(model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """A server for training on a free local port, as a user starts it; yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "trl_qurl", "serve", str(model), "--port", str(port), *arguments]
    command += ["--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "16"]
    environment = child_environment(TRL_QURL_CACHE=str(log.parent / "cache"), VLLM_CPU_KVCACHE_SPACE="1")
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, server, log)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_until_healthy(url: str, server: subprocess.Popen, log: Path, timeout: float = 240.0) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert server.poll() is None, f"the server ended:\n{log.read_text()[-6000:]}"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not start within {timeout} s:\n{log.read_text()[-6000:]}")
