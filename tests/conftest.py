"""How tests run: their order, what they need, and the processes that they start."""

import gc
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
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import forks
import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("support")
pytest_plugins = ["support.fixtures"]

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

LONGEST_FIRST = (
    "runner-v2",
    "server",
    "faults",
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

KNOWN_SKIPS = Path(__file__).parent / "known_skips.txt"
"""Reasons for which CI may skip a test, one a line."""

TESTS_PER_MINUTE = 450
"""Of `make test` with two cores, whose tests with engines take most of the time."""

PROCESSOR = Path("/proc/cpuinfo").read_text()
INSTRUCTIONS = os.environ.get("ONEDNN_MAX_CPU_ISA", PROCESSOR).lower()  # as a laptop, fewer

needs_avx512 = pytest.mark.skipif(
    "avx512f" not in INSTRUCTIONS, reason="vLLM's CPU build has this for AVX-512 alone"
)
needs_fp8_products = pytest.mark.skipif(
    "amx" in PROCESSOR and "amx" not in INSTRUCTIONS,
    reason="torch multiplies FP8 with AMX, which oneDNN may not use here",
)
SATURATES = "vnni" not in INSTRUCTIONS
"""True if sums in oneDNN's INT8 kernel saturate, by 2 % of the outputs and more."""

needs_vnni = pytest.mark.skipif(
    SATURATES, reason="without VNNI, sums in oneDNN's INT8 kernel saturate"
)

needs_llmcompressor = pytest.mark.skipif(
    find_spec("llmcompressor") is None, reason="needs llm-compressor (trl-qurl[llmcompressor])"
)

FORGET_OURS = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "trl_qurl"]:
    del sys.modules[name]
"""
"""Code for a fork in which our modules are to be imported from nothing."""

DISTRIBUTED_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that TRL sets for an engine in its own process."""


def child_environment(**extra):
    """Variables for child processes: one thread each, free ports."""
    inherited = dict(os.environ)
    # An engine in this process leaves its rank behind in the environment; a child has its own.
    for name in DISTRIBUTED_VARIABLES:
        inherited.pop(name, None)
    return inherited | {
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_PORT": str(free_port()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **extra,
    }


def completed(*command, cwd=None, status=0, seconds=2400, **extra):
    """Run a command as a child process, which must end with this status, and return it with what
    it printed.
    """
    words = [*map(str, command)]
    environment = child_environment(**extra)
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds
    )
    printed = done.stdout[-2000:] + done.stderr[-6000:]
    assert done.returncode == status, printed
    return done


def free_port():
    """Return a port below those that the system hands out:
    nobody else gets it before it is used.
    """
    port = 10_000 + secrets.randbelow(20_000)
    with socket.socket() as listener, suppress(OSError):
        listener.bind(("127.0.0.1", port))
        return port
    return free_port()


def pytest_configure(config):
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


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(SHARED_DIRECTORY), ignore_errors=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Where `KNOWN_SKIPS_ONLY` is set, a test that is skipped for another reason is a failure."""
    if "KNOWN_SKIPS_ONLY" not in os.environ or hasattr(session.config, "workerinput"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    known = KNOWN_SKIPS.read_text().splitlines()
    unknown = set()
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in known:
            unknown.add(reason)
    if unknown:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.write_line(
            f"\nA skip for a reason that {KNOWN_SKIPS.name} does not list: {'; '.join(sorted(unknown))}"
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The long groups first, then other tests with engines, then the rest."""

    def place(item):
        mark = item.get_closest_marker("xdist_group")
        if mark and mark.args[0] in LONGEST_FIRST:
            return LONGEST_FIRST.index(mark.args[0])
        starts_engine = item.get_closest_marker("vllm") is not None
        return len(LONGEST_FIRST) + (mark is None) + (not starts_engine)

    items.sort(key=place)


def pytest_collection_finish(session):
    if not session.config.option.collectonly and any(
        "warm_python" in item.fixturenames for item in session.items
    ):
        start_forks()  # imports while the first tests run
    gc.collect()
    # engines collect garbage when they start and end, for a tenth of a second and more each time
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    """Say what is coming, once the first worker has counted."""
    if node.gateway.id != "gw0":
        return
    takes = ""
    if node.config.option.markexpr == "not slow" and len(ids) > 2000:  # `make test`, all of it
        takes = f", about {len(ids) / TESTS_PER_MINUTE:.0f} minutes on two cores"
    node.config.get_terminal_writer().line(
        f"\n{len(ids)} tests{takes}. s: skipped, as this machine lacks what the test needs; the end "
        "lists it."
    )


@pytest.fixture(scope="module", autouse=True)
def environment_of_a_module():
    """Restore the variables that an engine in this process sets, such as LD_PRELOAD."""
    before = dict(os.environ)
    yield
    # pytest itself sets this one
    before["PYTEST_CURRENT_TEST"] = os.environ["PYTEST_CURRENT_TEST"]
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def start_forks():
    directory = Path(os.environ[SHARED_DIRECTORY])
    environment = child_environment(VLLM_LOGGING_LEVEL="ERROR")
    return forks.start(directory, environment, owner=int((directory / "owner").read_text()))


def selected(request, cases):
    """Return those of the cases for which a selected test uses the fixture."""
    wanted = set()
    for item in request.session.items:
        if item.path != request.path or request.fixturename not in item.fixturenames:
            continue
        if not any(mark.args[0] for mark in item.iter_markers("skipif")):
            wanted.add(item.callspec.params["case"])
    return {case: arguments for case, arguments in cases.items() if case in wanted}


def kill_group(leader):
    """A process that leads a group, and the group with it, unless it has ended."""
    if leader.poll() is None:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait(30)


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
        model,
        directory,
        *arguments,
        port=None,
        python=sys.executable,
        has_worker=False,
    ):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"server-{time.monotonic_ns()}.log"
        options = f"--port {self.port} --kv-cache-memory-bytes 64M --enforce-eager"
        options += " --max-model-len 64 --max-num-seqs 16"
        command = [python, "-m", "trl_qurl", "serve", model, *options.split(), *arguments]
        environment = child_environment(TRL_QURL_CACHE=directory / "cache")
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

    def wait_until_healthy(self):
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-6000:]}"
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return self
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise AssertionError(
            f"the server did not start within 240 s:\n{self.log.read_text()[-6000:]}"
        )

    def send(self, number):
        """Send a signal to all processes of the server."""
        os.killpg(self.process.pid, number)

    def kill(self):
        """Kill the server, as in a crash."""
        kill_group(self.process)

    def stop(self, number=signal.SIGTERM):
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

    def survivors_after(self, seconds):
        """Return the processes that still run after this time."""
        deadline = time.monotonic() + seconds
        while self.survivors() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.survivors()

    def survivors(self):
        """Processes of the server that still run."""
        return group_members(self.process.pid)


def group_members(group):
    """Processes of a group that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            _, _, after_name = path.read_text().rpartition(")")
            state, _, its_group, *_ = after_name.split()
            # A process whose first thread has ended keeps its files and locks until the last one has.
            is_running = state != "Z" or len(os.listdir(path.parent / "task")) > 1
            if int(its_group) == group and is_running:
                found.append(int(path.parent.name))
    return found


@contextmanager
def vllm_server(*arguments, **options):
    """A `Server` that is up inside the block."""
    server = Server(*arguments, **options)
    try:
        yield server.wait_until_healthy()
        server.stop()
        assert not server.survivors_after(60), (
            f"SIGTERM left processes behind: {server.survivors()}"
        )
    finally:
        server.kill()
