"""Processes that tests start: training scenarios, engines and servers."""

import fcntl
import gc
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import forks
import pytest
from hypothesis import HealthCheck, settings
from packaging.version import Version

pytest.register_assert_rewrite("support")

SCENARIOS = Path(__file__).parent / "scenarios"

# Workers and what they start share the cores, and engines that live for seconds need not be
# compiled (vLLM compiles its sampler even with `enforce_eager`). Nothing asks the Hub.
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}

# A worker of pytest-xdist is a fork (`forks`), but tests that use `sys.executable` need a fresh
# Python.
sys.executable = os.environ.setdefault("TRL_QURL_TESTS_PYTHON", sys.executable)
multiprocessing.set_executable(sys.executable)

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

SHARED_DIRECTORY = "TRL_QURL_TESTS"
"""Variable with a directory of this run of pytest, the same for all of its workers."""

SCENARIO_BYTES = 2 * 2**30
"""Peak memory of one process of a scenario, with some room."""

LONGEST_FIRST = (
    "server",
    "faults",
    "ahead",
    "colocated",
    "notebooks",
    "adapter server",
    "matrix servers",
    "resume",
    "simulated gpu",
    "mismatch",
    "ppo",
    "evaluation",
    "saving",
    "trainer",
    "conformance",
    "recipes",
    "doctor",
)
"""Groups of tests that take long. Workers take them first, in this order."""

INSTRUCTIONS = Path("/proc/cpuinfo").read_text()

needs_avx512 = pytest.mark.skipif(
    "avx512f" not in INSTRUCTIONS, reason="vLLM's CPU build has this for AVX-512 alone"
)
SATURATES = "vnni" not in INSTRUCTIONS
"""True if sums in oneDNN's INT8 kernel saturate, by 2 % of the outputs and more."""

needs_vnni = pytest.mark.skipif(
    SATURATES, reason="without VNNI, sums in oneDNN's INT8 kernel saturate"
)

needs_llmcompressor = pytest.mark.skipif(
    find_spec("llmcompressor") is None, reason="needs llm-compressor (trl-qurl[llmcompressor])"
)

needs_trl_1_16 = pytest.mark.skipif(
    Version(version("trl")) < Version("1.16"),
    reason="docs/architecture.md lists the trainers of TRL 1.16",
)

FORGET_OURS = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "trl_qurl"]:
    del sys.modules[name]
"""
"""Code for a fork in which our modules are to be imported from nothing."""

DISTRIBUTED_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that TRL sets for an engine in its own process."""


def child_environment(**extra: str) -> dict[str, str]:
    """Variables for child processes: one thread each, free ports."""
    # An engine in this process leaves its rank behind in the environment; a child has its own.
    inherited = {
        name: value for name, value in os.environ.items() if name not in DISTRIBUTED_VARIABLES
    }
    return inherited | {
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_PORT": str(free_port()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **extra,
    }


def completed(
    *command: object, cwd: Path | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed as a child process, and return it with what it printed."""
    words, environment = [*map(str, command)], child_environment(**extra)
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=2400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done


def free_port() -> int:
    """Return a port below those that the system hands out:
    nobody else gets it before it is used.
    """
    with socket.socket() as listener, suppress(OSError):
        listener.bind(("127.0.0.1", port := 10_000 + secrets.randbelow(20_000)))
        return port
    return free_port()


def pytest_configure(config: pytest.Config) -> None:
    # as in a shell's background, and then in all children
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["VLLM_API_KEY"] = "key-of-the-tests"
    if not hasattr(config, "workerinput"):
        directory = Path(tempfile.mkdtemp(prefix="trl-qurl-tests-"))
        (directory / "owner").write_text(str(os.getpid()))
        os.environ[SHARED_DIRECTORY] = str(directory)
        workers = getattr(config.option, "tx", None)
        if workers and not config.option.collectonly:
            # pytest-xdist would begin with the groups with the most tests instead of the longest
            # ones.
            config.option.loadscopereorder = False
            # Each worker, and what starts the forks, would import the same for as long as the other
            # does.
            config.option.tx = [f"{worker}//python={start_forks()}" for worker in workers]


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(SHARED_DIRECTORY), ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long groups first, then other tests with engines, then the rest."""

    def place(item: pytest.Item) -> int:
        mark = item.get_closest_marker("xdist_group")
        group = mark and (mark.args[0] if mark.args else mark.kwargs["name"])
        if group in LONGEST_FIRST:
            return LONGEST_FIRST.index(group)
        return len(LONGEST_FIRST) + (group is None) + (item.get_closest_marker("vllm") is None)

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and any(
        "warm_python" in item.fixturenames for item in session.items
    ):
        start_forks()  # imports while the first tests run
    gc.collect()
    # engines collect garbage when they start and end, for a tenth of a second and more each time
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def environment_of_a_module() -> Iterator[None]:
    """Restore the variables that an engine in this process sets, such as LD_PRELOAD."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
    os.environ.update(
        {name: value for name, value in before.items() if name != "PYTEST_CURRENT_TEST"}
    )


def start_forks() -> Path:
    directory = Path(os.environ[SHARED_DIRECTORY])
    environment = child_environment(VLLM_LOGGING_LEVEL="ERROR")
    return forks.start(directory, environment, owner=int((directory / "owner").read_text()))


@pytest.fixture(scope="session")
def warm_python() -> Path:
    """A `python` that has imported everything (`forks`), for tests that do not need a fresh
    process.
    """
    return start_forks()


def selected(request: pytest.FixtureRequest, *parameters: str) -> set[tuple[Any, ...]]:
    """Return the values of these parameters in the selected tests that use the fixture."""
    items = [item for item in request.session.items if item.path == request.path]
    items = [item for item in items if request.fixturename in item.fixturenames]
    items = [
        item for item in items if not any(mark.args[0] for mark in item.iter_markers("skipif"))
    ]
    return {tuple(item.callspec.params[name] for name in parameters) for item in items}


@contextmanager
def memory_for(processes: int) -> Iterator[None]:
    """Wait until the scenarios of all workers leave enough memory for more processes."""
    directory = Path(os.environ[SHARED_DIRECTORY])
    slots = max(2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SCENARIO_BYTES)
    with ExitStack() as taken:
        # one at a time, or two could wait for each other
        with (directory / "queue").open("w") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            for _ in range(min(processes, slots)):
                taken.callback(take_slot(directory, slots).close)
        yield


def take_slot(directory: Path, slots: int) -> IO[str]:
    """Lock a free slot, or wait for the first one."""
    for number in range(slots):
        file = (directory / f"slot-{number}").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            file.close()
    file = (directory / "slot-0").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@pytest.fixture(scope="session")
def run_scenario(warm_python, tmp_path_factory) -> Callable[..., Any]:
    """Run a script of tests/scenarios, in one process or several,
    and return the record it prints.
    """

    def run(script: str, *arguments: object, processes: int = 1, **extra: str) -> Any:
        command = [warm_python, SCENARIOS / script, *map(str, arguments)]
        environment = child_environment(VLLM_LOGGING_LEVEL="ERROR", **extra)
        environments = (
            [environment] if processes == 1 else launched_environments(environment, processes)
        )
        directory = tmp_path_factory.mktemp("printed")
        printed = [
            [directory / f"{rank}.{name}" for name in ("out", "err")] for rank in range(processes)
        ]
        started = []
        with memory_for(processes), ExitStack() as end:
            for environment, paths in zip(environments, printed, strict=True):
                out, err = (end.enter_context(path.open("w")) for path in paths)
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    process_group=0,
                )
                started.append(process)
                end.callback(kill_group, process)
            for process in started:
                process.wait(1500)
        outs, errs = zip(
            *([path.read_text(errors="replace") for path in paths] for paths in printed),
            strict=True,
        )
        records = [line for out in outs for line in out.splitlines() if line.startswith("RECORD ")]
        assert not any(process.returncode for process in started) and len(records) == 1, "\n".join(
            f"{script} {' '.join(map(str, arguments))}, process {rank}, ended with "
            f"{process.returncode}:\n{outs[rank][-3000:]}\n{errs[rank][-6000:]}"
            for rank, process in enumerate(started)
        )
        return json.loads(records[0].removeprefix("RECORD "))

    return run


def kill_group(leader: subprocess.Popen) -> None:
    """A process that leads a group, and the group with it, unless it has ended."""
    if leader.poll() is None:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait(30)


@pytest.fixture(scope="session")
def train(run_scenario) -> Callable[..., list[Any]]:
    """Run tests/scenarios/train.py once for each list of arguments, in one process (or group of
    them); the records. A dictionary among the arguments is a config.
    """

    def run(*runs: list, processes: int = 1) -> list[Any]:
        arguments: list[object] = []
        for parts in runs:
            for part in ["--and", *parts]:
                is_config = isinstance(part, dict)
                arguments += ["--config", json.dumps(part)] if is_config else [part]
        return run_scenario("train.py", *arguments[1:], processes=processes)

    return run


@pytest.fixture(scope="session")
def int8_server(warm_python, tmp_path_factory) -> Iterator["Server"]:
    """A server of the tiny model, shared by all tests that do not stop it."""
    from tiny import save_tiny

    directory = tmp_path_factory.mktemp("server")
    model = save_tiny(directory / "model")
    with vllm_server(
        model, directory, "--scheme", "int8", python=warm_python, has_worker=True
    ) as server:
        yield server


@pytest.fixture(scope="module")
def deployment(warm_python, tmp_path_factory) -> Iterator[Any]:
    """A server of the tests of a module, which may lose it, and trainers that use it."""
    from support.deployment import Deployment

    deployment = Deployment(tmp_path_factory.mktemp("deployment"), warm_python)
    yield deployment
    deployment.close()


def launched_environments(environment: dict[str, str], processes: int) -> list[dict[str, str]]:
    """Variables of `accelerate launch` with examples/accelerate_configs/multi_cpu.yaml, for each
    process.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    size = str(processes)
    return [
        environment
        | common
        | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        for rank in range(processes)
    ]


class Server:
    """
    `trl-qurl serve` as a user starts it, on a free local port.

    Args:
        model: Directory of the full-precision model.
        directory: For its log and its cache.
        arguments: Further arguments.
        port: Where the last one listened, to start it again in its place.
        python: What starts it.
        has_worker: Whether the model is in a separate process, as on users' CPUs. That process and
            the engine's spin for a second after each message, and take the cores from the tests.
            Without it, the model is in the engine's process, as on one GPU.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        *arguments: str,
        port: int | None = None,
        python: Path | str = sys.executable,
        has_worker: bool = False,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"server-{time.monotonic_ns()}.log"
        command = [python, "-m", "trl_qurl", "serve", str(model), "--port", str(self.port)]
        command += ["--kv-cache-memory-bytes", "64M", "--enforce-eager", "--max-model-len", "64"]
        command += ["--max-num-seqs", "16", *arguments]
        environment = child_environment(TRL_QURL_CACHE=str(directory / "cache"))
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(has_worker))
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
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
        raise AssertionError(
            f"the server did not start within {timeout} s:\n{self.log.read_text()[-6000:]}"
        )

    def send(self, number: int) -> None:
        """Send a signal to all processes of the server."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill the server, as in a crash."""
        if self.process.poll() is None:
            self.send(signal.SIGKILL)
        self.process.wait(30)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the server like a user or a batch system, with repeated signals, and return the exit
        status.
        """
        for patience in (5, 10, 20, 30, 60):
            # Python loses an interrupt that comes while vLLM's imports run a callback.
            self.process.send_signal(number)
            try:
                return self.process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        self.kill()
        raise AssertionError(
            f"the server went on after signal {number}:\n{self.log.read_text()[-6000:]}"
        )

    def survivors_after(self, seconds: float) -> list[int]:
        """Return the processes that still run after this time."""
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
    model: Path,
    directory: Path,
    *arguments: str,
    python: str | Path = sys.executable,
    has_worker: bool = False,
) -> Iterator[Server]:
    """A server that is up inside the block."""
    server = Server(model, directory, *arguments, python=python, has_worker=has_worker)
    try:
        yield server.wait_until_healthy()
        server.stop()
        assert not server.survivors_after(60), (
            f"SIGTERM left processes behind: {server.survivors()}"
        )
    finally:
        server.kill()
