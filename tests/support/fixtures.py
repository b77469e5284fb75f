"""The fixtures that several modules share: processes that have imported everything, servers."""

import fcntl
import importlib
import json
import os
import re
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import (
    SCENARIOS,
    SHARED_DIRECTORY,
    child_environment,
    free_port,
    kill_group,
    start_forks,
    vllm_server,
)
from documents import ROOT

SCENARIO_BYTES = 2 * 2**30
"""Peak memory of one process of a scenario, with some room."""


@pytest.fixture(scope="session")
def warm_python():
    """A `python` that has imported everything (`forks`), for tests that do not need a fresh
    process.
    """
    return start_forks()


@contextmanager
def memory_for(processes):
    """Wait until the scenarios of all workers leave enough memory for more processes."""
    directory = Path(os.environ[SHARED_DIRECTORY])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    slots = max(2, memory // SCENARIO_BYTES)
    with ExitStack() as taken:
        # one at a time, or two could wait for each other
        with (directory / "queue").open("w") as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            for _ in range(min(processes, slots)):
                taken.callback(take_slot(directory, slots).close)
        yield


def take_slot(directory, slots):
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
def run_scenario(warm_python, tmp_path_factory):
    """Run a script of tests/scenarios, in one process or several,
    and return the record it prints.
    """

    def run(script, *arguments, processes=1, **extra):
        command = [warm_python, SCENARIOS / script, *map(str, arguments)]
        environment = child_environment(VLLM_LOGGING_LEVEL="ERROR", **extra)
        environments = [environment]
        if processes > 1:
            environments = launched_environments(environment, processes)
        directory = tmp_path_factory.mktemp("printed")
        started = []
        with memory_for(processes), ExitStack() as end:
            for rank, environment in enumerate(environments):
                out = end.enter_context((directory / f"{rank}.out").open("w"))
                err = end.enter_context((directory / f"{rank}.err").open("w"))
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
        words = " ".join(map(str, arguments))
        records = []
        ends = ""
        for rank, process in enumerate(started):
            out = (directory / f"{rank}.out").read_text(errors="replace")
            err = (directory / f"{rank}.err").read_text(errors="replace")
            records += re.findall("^RECORD (.+)", out, re.MULTILINE)
            ends += (
                f"{script} {words}, process {rank}, ended with "
                f"{process.returncode}:\n{out[-3000:]}\n{err[-6000:]}\n"
            )
        assert not any(process.returncode for process in started), ends
        assert len(records) == 1, ends
        return json.loads(records[0])

    return run


@pytest.fixture
def script(monkeypatch):
    """Imports a script as a module, with its folder on the path as when it runs."""

    def load(folder, name):
        monkeypatch.syspath_prepend(ROOT / folder)
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def train(run_scenario):
    """Run tests/scenarios/train.py once for each list of arguments, in one process (or group of
    them); the records. A dictionary among the arguments is a config.
    """

    def run(*runs, processes=1):
        arguments = []
        for parts in runs:
            for part in ["--and", *parts]:
                if isinstance(part, dict):
                    arguments += ["--config", json.dumps(part)]
                else:
                    arguments.append(part)
        return run_scenario("train.py", *arguments[1:], processes=processes)

    return run


@pytest.fixture(scope="session")
def int8_server(warm_python, tmp_path_factory):
    """A server of the tiny model, shared by all tests that do not stop it."""
    from tiny import save_tiny  # which takes long to import

    directory = tmp_path_factory.mktemp("server")
    model = save_tiny(directory / "model")
    with vllm_server(
        model, directory, "--scheme", "int8", python=warm_python, has_worker=True
    ) as server:
        yield server


@pytest.fixture(scope="module")
def deployment(request, warm_python, tmp_path_factory):
    """A server of the tests of a module (with its `SERVER_OPTIONS`), which may lose it, and
    trainers that use it.
    """
    from support.deployment import Deployment  # which takes long to import

    options = getattr(request.module, "SERVER_OPTIONS", ())
    deployment = Deployment(tmp_path_factory.mktemp("deployment"), warm_python, *options)
    yield deployment
    deployment.close()


def launched_environments(environment, processes):
    """Variables of `accelerate launch` with examples/accelerate_configs/multi_cpu.yaml, for each
    process.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_MIXED_PRECISION": "no",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    environments = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environments.append(environment | common | own)
    return environments
