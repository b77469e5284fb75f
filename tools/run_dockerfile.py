"""Run a Dockerfile's RUN lines in a new virtual environment, for machines without a Docker daemon.

    python tools/run_dockerfile.py Dockerfile.cpu [--build-arg NAME=VALUE ...] [--keep DIRECTORY]

What an image would get is done below a temporary directory: WORKDIR and COPY make directories and files there, ENV and
ARG set variables, and RUN starts a shell in the current WORKDIR with a new environment's `python` and `pip` first on
PATH. Last, ENTRYPOINT runs with CMD. Not covered, and said so: the base image, and lines that call apt-get (packages
of the system, which this tool must not change).
"""

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

INSTRUCTIONS = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD"}
"""Those that this project's files use."""


class Instruction(NamedTuple):
    """One instruction of a Dockerfile."""

    line: int
    name: str
    value: str


def parse(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, with continued lines joined and comments left out.

    Raises:
        ValueError: If a line is not an instruction that this tool knows.
    """
    found: list[Instruction] = []
    continued = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        part = line.strip().removesuffix("\\").strip()
        if continued:
            found[-1] = found[-1]._replace(value=f"{found[-1].value} {part}")
        else:
            name, _, value = part.partition(" ")
            if name not in INSTRUCTIONS:
                raise ValueError(f"Line {number}: {name} is not one of {', '.join(sorted(INSTRUCTIONS))}.")
            found.append(Instruction(number, name, value.strip()))
        continued = line.rstrip().endswith("\\")
    return found


def expand(value: str, variables: dict[str, str]) -> str:
    """Docker's `$NAME` and `${NAME}`; what is not set is empty."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: variables.get(found[1] or found[2], ""), value)


def assignments(value: str) -> dict[str, str]:
    """`NAME=VALUE NAME="VALUE"` of ENV and ARG; a name without a value is left out."""
    return {name: text.strip('"') for name, text in re.findall(r'(\w+)=("[^"]*"|\S*)', value)}


def ignored(path: Path, patterns: list[str]) -> bool:
    """Whether .dockerignore leaves a path of the context out (its directories too)."""
    ways = [path, *path.parents]
    return any(
        fnmatch.fnmatch(way.as_posix(), pattern)
        or (pattern.startswith("**/") and fnmatch.fnmatch(way.name, pattern.removeprefix("**/")))
        for way in ways
        for pattern in patterns
    )


def context_files(context: Path) -> list[Path]:
    """What a build would send, relative to the context."""
    rules = context / ".dockerignore"
    lines = rules.read_text().splitlines() if rules.exists() else []
    patterns = [line for line in lines if line and not line.startswith("#")]
    found: list[Path] = []
    for directory, names, files in os.walk(context):
        here = Path(directory).relative_to(context)
        links = [name for name in names if (context / here / name).is_symlink()]
        names[:] = [name for name in names if name not in links and not ignored(here / name, patterns)]
        found += [here / name for name in (*files, *links) if not ignored(here / name, patterns)]
    return found


def copy(sources: list[str], target: Path, context: Path) -> int:
    """COPY: files of the context, or all of it (`.`), into the image; how many."""
    files = context_files(context)
    count = 0
    for source in sources:
        chosen = [path for path in files if source == "." or path == Path(source)]
        if not chosen:
            raise FileNotFoundError(f"COPY {source}: the context has no such file.")
        for path in chosen:
            place = target / path if source == "." else target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(context / path, place, follow_symlinks=False)
            count += 1
    return count


class Build:
    """The state of a build: where it is, its variables, and what became of each instruction."""

    def __init__(self, directory: Path, context: Path, arguments: dict[str, str]) -> None:
        self.root, self.context, self.arguments = directory / "image", context, arguments
        self.root.mkdir(parents=True)
        self.workdir = self.root
        self.variables: dict[str, str] = {}
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        self.environment = directory / "environment"
        venv.create(self.environment, with_pip=True)

    def shell_environment(self) -> dict[str, str]:
        """The variables of RUN: those of this machine, without an active environment of its own."""
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        path = f"{self.environment / 'bin'}{os.pathsep}{inherited['PATH']}"
        given = {name: value for name, value in self.variables.items() if value or name not in inherited}
        return inherited | given | {"PATH": path, "VIRTUAL_ENV": str(self.environment)}

    def run(self, command: str | list[str]) -> None:
        """Run a shell line, or the words of ENTRYPOINT and CMD."""
        words = ["sh", "-ec", command] if isinstance(command, str) else command
        subprocess.run(words, cwd=self.workdir, env=self.shell_environment(), check=True)

    def start(self) -> None:
        """What a container of the image would run: ENTRYPOINT with CMD."""
        if words := [*self.entrypoint, *self.command]:
            print(f"    {' '.join(words)}", flush=True)
            program = shutil.which(words[0], path=self.shell_environment()["PATH"])
            self.run([program or words[0], *words[1:]])

    def carry_out(self, instruction: Instruction) -> str:
        """One instruction; what became of it, in words."""
        name, value = instruction.name, instruction.value
        if name == "ARG":
            word = value.partition("=")[0]
            self.variables[word] = self.arguments.get(word, assignments(value).get(word, self.variables.get(word, "")))
            return "set" if self.variables[word] else "empty"
        if name == "ENV":
            self.variables |= {key: expand(text, self.variables) for key, text in assignments(value).items()}
            return "set"
        if name == "FROM":
            return f"skipped: this machine's Python {sys.version_info.major}.{sys.version_info.minor} in its place"
        if name == "WORKDIR":
            self.workdir = self.root / expand(value, self.variables).lstrip("/")
            self.workdir.mkdir(parents=True, exist_ok=True)
            return "made"
        if name == "COPY":
            *sources, target = value.split()
            return f"{copy(sources, self.workdir / target, self.context)} files"
        if name == "RUN":
            if "apt-get" in value:
                return "skipped: packages of the system, which need root and a Debian image"
            started = time.monotonic()
            self.run(value)
            return f"ran, {time.monotonic() - started:.0f} s"
        words = json.loads(value)
        if name == "ENTRYPOINT":
            self.entrypoint = words
        else:
            self.command = words
        return "kept for the end"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="a value for ARG")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="work here, and leave it behind")
    options = parser.parse_args()
    instructions = parse(options.dockerfile.read_text())
    arguments = dict(argument.split("=", 1) for argument in options.build_arg)
    with tempfile.TemporaryDirectory(prefix="run-dockerfile-") as temporary:
        directory = options.keep or Path(temporary)
        build = Build(directory.resolve(), options.dockerfile.resolve().parent, arguments)
        try:
            for instruction in instructions:
                print(f"{instruction.line:3} {instruction.name} {instruction.value}", flush=True)
                print(f"    {build.carry_out(instruction)}", flush=True)
            build.start()
        except subprocess.CalledProcessError as error:
            sys.exit(f"    failed with exit status {error.returncode}")


if __name__ == "__main__":
    main()
