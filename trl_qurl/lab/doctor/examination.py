"""All checks in order: quick inspections first, then real tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from trl_qurl.lab.doctor import driver, machine, packages
from trl_qurl.lab.doctor.lines import Line, Status, note, skipped
from trl_qurl.lab.doctor.plan import TORCH_JOB, UNQUANTIZED, Job, plan
from trl_qurl.lab.doctor.trial import try_job

IMPORT_SECONDS = 120.0  # time limit for importing torch


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
        report: Called with each line as soon as it is ready.
        busy: Called with the names of the lines about to be tested.
        quick: Skip all checks that start an engine.
        formats: Format names, `"none"` for 16 bits; by default all with kernels on this machine.
        only: Names of the lines to report; by default all.
        port: A port that must be free for a server.
        time_limit: Time limit in seconds for each process with an engine.

    Returns:
        The reported lines.
    """
    lines: dict[str, Line] = {}

    def is_selected(names: Sequence[str]) -> bool:
        return not only or any(name in only for name in names)

    def add(line: Line) -> None:
        lines[line.name] = line
        if is_selected([line.name]):
            report(line)

    def attempt(job: Job, gpu: str | None, limit: float) -> None:
        busy([name for name in job.lines if is_selected([name])])
        try_job(job, gpu, limit, add)

    for name, check in inspections(port).items():
        if is_selected([name]) or name == "vllm":  # later checks depend on it
            try:
                add(check())
            except Exception as error:  # the other lines are still useful
                add(note(name, f"could not be determined ({type(error).__name__}: {error})."))
    if only and not set(only) - inspections(port).keys():
        return [lines[name] for name in lines if name in only]
    attempt(TORCH_JOB, None, IMPORT_SECONDS)
    gpu = first_gpu(lines["gpus"].data.get("count", 0))
    formats = formats or [*lines["formats"].data.get("formats", []), UNQUANTIZED]
    for job in plan(formats):
        if not is_selected(job.lines):
            continue
        if reason := "needs a GPU" if job.needs_gpu and gpu is None else obstacle(lines, quick):
            for name in job.lines:
                add(skipped(name, reason))
        else:
            attempt(job, gpu, time_limit * job.patience)
    return [line for name, line in lines.items() if is_selected([name])]


def inspections(port: int | None) -> dict[str, Callable[[], Line]]:
    """Return the quick checks by line name."""
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


def obstacle(lines: dict[str, Line], quick: bool) -> str | None:
    """Return the reason for not starting engines in any format, or `None`."""
    if quick:
        return "--quick starts no engine"
    broken = [name for name in ("vllm", "torch") if lines[name].status is Status.FAILED]
    return f"depends on the line {broken[0]}, which failed" if broken else None


def first_gpu(count: int) -> str | None:
    """Return the first GPU visible to torch, as named in CUDA_VISIBLE_DEVICES; `None` without one."""
    return (os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0") if count else None
