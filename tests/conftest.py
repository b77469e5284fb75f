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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from forks import Forks, WarmPython
from tiny import tiny_model, tiny_tokenizer

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
def forks() -> Forks:
    return Forks(child_environment(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR"))


@pytest.fixture(scope="session")
def run_scenario(forks, tmp_path_factory) -> Callable[..., Any]:
    """Run a script of tests/scenarios, in one process or several, and return the record it prints."""

    def run(script: str, *arguments: object, processes: int = 1, **extra: str) -> Any:
        environment = child_environment(**extra)
        environments = [environment] if processes == 1 else launched_environments(environment, processes)
        finished = forks.run(
            SCENARIOS / script, list(map(str, arguments)), environments, tmp_path_factory.mktemp("printed"), 400
        )
        records = [line for process in finished for line in process.stdout.splitlines() if line.startswith("RECORD ")]
        assert all(process.status == 0 for process in finished) and len(records) == 1, "\n".join(
            f"{script} {' '.join(map(str, arguments))}, process {rank}, ended with {process.status}:\n"
            f"{process.stdout[-3000:]}\n{process.stderr[-6000:]}"
            for rank, process in enumerate(finished)
        )
        return json.loads(records[0].removeprefix("RECORD "))

    return run


@pytest.fixture(scope="session")
def train(run_scenario) -> Callable[..., list[Any]]:
    """Run tests/scenarios/train.py once for each list of arguments, in one process (or group of them); the records."""

    def run(*runs: list, processes: int = 1) -> list[Any]:
        arguments = runs[0] + [part for further in runs[1:] for part in ["--and", *further]]
        return run_scenario("train.py", *arguments, processes=processes)

    return run


@pytest.fixture(scope="session")
def warm_python(forks, tmp_path_factory) -> Iterator[WarmPython]:
    """A `python` that has imported TRL and vLLM already."""
    python = WarmPython(forks, tmp_path_factory.mktemp("python"))
    yield python
    python.close()


@pytest.fixture(scope="session")
def int8_server(tmp_path_factory) -> Iterator["Server"]:
    """A server of the tiny model, for all tests that leave it alive."""
    directory = tmp_path_factory.mktemp("server")
    tiny_model().save_pretrained(directory / "model")
    tiny_tokenizer().save_pretrained(directory / "model")
    with vllm_server(directory / "model", directory, "--scheme", "int8") as server:
        yield server


def launched_environments(environment: dict[str, str], processes: int) -> list[dict[str, str]]:
    """What `accelerate launch` with examples/accelerate_configs/multi_cpu.yaml gives to each process."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_MIXED_PRECISION": "no"}
    size = str(processes)
    return [
        environment
        | common
        | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        for rank in range(processes)
    ]


class Server:
    """
    `trl-qurl serve` as a user starts it, on a local port of its own, and what may happen to it.

    Args:
        model: Directory of the full-precision model.
        directory: For its log and its cache.
        arguments: Further arguments.
        port: Where the last one listened, to start it again in its place.
        python: What runs it.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        *arguments: str,
        port: int | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"server-{time.monotonic_ns()}.log"
        command = [str(python), "-m", "trl_qurl", "serve", str(model), "--port", str(self.port), *arguments]
        command += ["--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "16"]
        environment = child_environment(TRL_QURL_CACHE=str(directory / "cache"), VLLM_CPU_KVCACHE_SPACE="1")
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def wait_until_healthy(self, timeout: float = 240.0) -> "Server":
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-6000:]}"
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return self
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise AssertionError(f"the server did not start within {timeout} s:\n{self.log.read_text()[-6000:]}")

    def send(self, number: int) -> None:
        """To the server and every process it started."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """As a crash, or a machine that went down."""
        if self.process.poll() is None:
            self.send(signal.SIGKILL)
        self.process.wait(30)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """As a user or a batch system does, who asks again after a while; the exit status."""
        for patience in (30, 60):
            # Python loses an interrupt that comes while vLLM's imports run a callback.
            self.process.send_signal(number)
            try:
                return self.process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        self.kill()
        raise AssertionError(f"the server went on after signal {number}:\n{self.log.read_text()[-6000:]}")

    def survivors_after(self, seconds: float) -> list[int]:
        """Processes that still run when that time is over; those that are about to end may take it."""
        deadline = time.monotonic() + seconds
        while self.survivors() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.survivors()

    def survivors(self) -> list[int]:
        """Processes of the server that still run."""
        return group_members(self.process.pid)


def group_members(group: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            state, _, its_group, *_ = path.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state != "Z":
                found.append(int(path.parent.name))
    return found


@contextmanager
def vllm_server(
    model: Path, directory: Path, *arguments: str, python: str | Path = sys.executable
) -> Iterator[Server]:
    """A server that is up inside the block."""
    server = Server(model, directory, *arguments, python=python)
    try:
        yield server.wait_until_healthy()
        server.stop()
        assert not server.survivors_after(10), f"SIGTERM left processes behind: {server.survivors()}"
    finally:
        server.kill()
