"""All checks in their order: those that only look, then those that try."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from trl_qurl.lab.doctor import driver, machine, packages
from trl_qurl.lab.doctor.lines import Line, Status, note, skipped
from trl_qurl.lab.doctor.plan import LOOK, UNQUANTIZED, Job, plan
from trl_qurl.lab.doctor.trial import try_job

IMPORT_SECONDS = 120.0  # that torch may take to be imported


def examine(
    report: Callable[[Line], None],
    busy: Callable[[Sequence[str]], None] = lambda names: None,
    quick: bool = False,
    formats: Sequence[str] = (),
    only: Collection[str] = (),
    port: int | None = None,
    time_limit: float = 180.0,
) -> list[Line]:
    """Check what works on this machine.

    Args:
        report: Called with each line as soon as it is known.
        busy: Called with the names of the lines that are tried next.
        quick: Whether to start no engine.
        formats: Names of formats, `"none"` for 16 bits; by default those with kernels here.
        only: Names of the lines to report; by default all.
        port: A port that must be free for a server.
        time_limit: Seconds that a process with an engine may take.

    Returns:
        The lines that were reported.
    """
    found: dict[str, Line] = {}

    def is_wanted(names: Sequence[str]) -> bool:
        return not only or any(name in only for name in names)

    def add(line: Line) -> None:
        found[line.name] = line
        if is_wanted([line.name]):
            report(line)

    def attempt(job: Job, gpu: str | None, limit: float) -> None:
        busy([name for name in job.lines if is_wanted([name])])
        try_job(job, gpu, limit, add)

    for name, look in looks(port).items():
        if is_wanted([name]) or name == "vllm":  # what follows depends on it
            try:
                add(look())
            except Exception as error:  # whatever is broken here, the rest is still worth having
                add(note(name, f"could not be determined ({type(error).__name__}: {error})."))
    if only and not set(only) - looks(port).keys():
        return [found[name] for name in found if name in only]
    attempt(LOOK, None, IMPORT_SECONDS)
    gpu = first_gpu(found["gpus"].data.get("count", 0))
    formats = formats or [*found["formats"].data.get("formats", []), UNQUANTIZED]
    for job in plan(formats):
        if not is_wanted(job.lines):
            continue
        if reason := "needs a GPU" if job.needs_gpu and gpu is None else obstacle(found, quick):
            for name in job.lines:
                add(skipped(name, reason))
        else:
            attempt(job, gpu, time_limit * job.patience)
    return [line for name, line in found.items() if is_wanted([name])]


def looks(port: int | None) -> dict[str, Callable[[], Line]]:
    """The checks that only look, by the names of their lines."""
    return {
        "python": packages.check_python,
        "packages": packages.check_packages,
        "driver": driver.check_driver,
        "vllm": packages.check_vllm,
        "cpu": machine.check_cpu,
        "memory": machine.check_memory,
        "allocator": machine.check_allocator,
        "threads": machine.check_threads,
        "shm": machine.check_shm,
        "ports": lambda: machine.check_ports(port),
        "variables": machine.check_variables,
    }


def obstacle(found: dict[str, Line], quick: bool) -> str | None:
    """Why no engine is tried, whatever the format."""
    if quick:
        return "--quick starts no engine"
    broken = [name for name in ("vllm", "torch") if found[name].status is Status.FAILED]
    return f"needs what the line {broken[0]} is about" if broken else None


def first_gpu(count: int) -> str | None:
    """The first of the GPUs that torch sees, as CUDA_VISIBLE_DEVICES names it; `None` if it sees none."""
    return (os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0") if count else None
