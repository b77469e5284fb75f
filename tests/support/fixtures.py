"""The fixtures that several modules share: processes that have imported everything, servers."""

import fcntl
import json
import os
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
    slots = max(2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SCENARIO_BYTES)
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


@pytest.fixture(scope="session")
def train(run_scenario):
    """Run tests/scenarios/train.py once for each list of arguments, in one process (or group of
    them); the records. A dictionary among the arguments is a config.
    """

    def run(*runs, processes=1):
        arguments: list[object] = []
        for parts in runs:
            for part in ["--and", *parts]:
                is_config = isinstance(part, dict)
                arguments += ["--config", json.dumps(part)] if is_config else [part]
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
def deployment(warm_python, tmp_path_factory):
    """A server of the tests of a module, which may lose it, and trainers that use it."""
    from support.deployment import Deployment  # which takes long to import

    deployment = Deployment(tmp_path_factory.mktemp("deployment"), warm_python)
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
    }
    size = str(processes)
    return [
        environment
        | common
        | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        for rank in range(processes)
    ]
