"""Make `.venv` match the lock file of this machine's profile, and do nothing when it already does.

pip installs uv, and uv the rest, in a fraction of pip's time. Where uv fails, pip takes its place:
it may know ways to an index that uv does not. The lock files name every package, so nothing is
resolved: first torch is installed with its dependencies (its CUDA libraries differ between builds),
then the whole lock file with `--no-deps`, then the project itself. `requirements/README.md` says
why. A state file inside `.venv` is marked complete at the very end; until then, the next call
continues, and reinstalls whatever was only partly unpacked.

Only the standard library is used: this runs before anything is installed.
"""

import argparse
import ast
import contextlib
import csv
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
STATE_FILE = VENV / "trl-qurl-setup.json"
LOG_FILE = VENV / "trl-qurl-setup.log"

OLDEST_PYTHON = (3, 11)  # what the lock files are for
NEWEST_PYTHON = (3, 13)
# Installed size plus room to unpack; the CPU profile took 4.8 at its peak.
DISK_NEEDED_GB = {"cpu": 6, "gpu": 20}
SECONDS_BETWEEN_REPORTS = 10
LOG_LINES_SHOWN = 15
CHARACTERS_SHOWN = 80

PIP_INSTALL = (VENV_PYTHON, "-m", "pip", "install", "--no-input", "--progress-bar=off")
# pip takes the best version of all indexes, uv by default that of the first one that has any.
UV_INSTALL = (UV, "pip", "install", "--python", VENV_PYTHON, "--index-strategy=unsafe-best-match")
# pip's options, what uv calls them, and what it wants between several values
UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_OFFLINE", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
# If one of these is set, the user chose where torch comes from.
SOURCES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "UV_OFFLINE", "UV_TORCH_BACKEND")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--profile",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="which lock file to install",
    )
    profile = parser.parse_args().profile
    check_platform()
    if profile == "auto":
        profile = profile_of_this_machine()
    lock_file = ROOT / "requirements" / f"{profile}.lock"
    wanted = {
        "profile": profile,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "inputs": fingerprint(lock_file, ROOT / "setup.cfg", ROOT / "pyproject.toml"),
    }
    done = {**wanted, "complete": True}
    if read_state() == done:
        print(f".venv is up to date ({profile} profile)")
        return

    started = time.monotonic()
    with only_one_at_a_time():
        state = read_state()
        if state == done:  # another process finished while this one waited
            return
        if must_be_created(state, wanted):
            create_venv(profile)
        elif not state.get("complete"):
            forget_half_installed()
        write_state({**wanted, "complete": False})
        LOG_FILE.write_text("")
        print("[1/4] uv", flush=True)
        pip_install("--no-deps", "--constraint", lock_file, "uv")
        backend = backend_of_torch(profile)
        install(f"[2/4] torch ({profile} profile)", "--constraint", lock_file, "torch", **backend)
        packages = ("--no-deps", "--requirement", lock_file)
        install(f"[3/4] {lock_file.relative_to(ROOT)}", *packages, **bytecode())
        install("[4/4] trl-qurl, editable", "--no-deps", "--no-build-isolation", "--editable", ROOT)
        write_state(done)
    print(f".venv is ready after {time.monotonic() - started:.0f} s", flush=True)


def check_platform() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        fail(
            f"trl-qurl needs Linux on x86_64, and this is {platform.system()} on "
            f"{platform.machine()}. Use such a machine, Colab, or WSL 2 on Windows"
        )
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        fail(
            f"this is Python {platform.python_version()}, and the lock files are for Python 3.11 "
            "to 3.13. Use one of those: make setup PYTHON=/path/to/python3.11"
        )


def profile_of_this_machine() -> str:
    """`gpu` if the NVIDIA driver lists a device, otherwise `cpu`."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "gpu" if listing.returncode == 0 and "GPU" in listing.stdout else "cpu"


def fingerprint(*files: Path) -> str:
    """A hash of the files' contents and of the environment's path, which its scripts contain."""
    digest = hashlib.sha256(str(VENV).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def read_state() -> dict[str, object]:
    """What the last run recorded; empty without one, or if the environment's Python is gone."""
    if not os.access(VENV_PYTHON, os.X_OK):
        return {}
    try:
        return json.loads(STATE_FILE.read_text())
    except (OSError, ValueError):
        return {}


def write_state(state: dict[str, object]) -> None:
    temporary = STATE_FILE.with_suffix(".tmp")
    temporary.write_text(json.dumps(state, indent=2) + "\n")
    os.replace(temporary, STATE_FILE)


@contextlib.contextmanager
def only_one_at_a_time() -> Iterator[None]:
    """Hold a lock on the repository folder: two terminals must not install into one environment."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another set-up of this folder to finish", flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def must_be_created(state: dict[str, object], wanted: dict[str, object]) -> bool:
    """Whether there is no environment for this profile and Python with a working pip."""
    if not os.access(VENV_PYTHON, os.X_OK):
        return True
    if any(state.get(key, wanted[key]) != wanted[key] for key in ("profile", "python")):
        return True
    pip = subprocess.run([VENV_PYTHON, "-m", "pip", "--version"], capture_output=True)
    return pip.returncode != 0


def create_venv(profile: str) -> None:
    """Create an empty environment, after removing an old one.

    The two profiles overwrite each other's files.
    """
    if importlib.util.find_spec("ensurepip") is None:
        fail(
            f"this Python ({sys.executable}) cannot create environments: it lacks ensurepip. "
            "Install it (on Debian and Ubuntu the package python3-venv), or use another Python "
            "with PYTHON=..."
        )
    old = VENV.with_name(".venv.old")
    if VENV.exists():
        VENV.rename(old)
    shutil.rmtree(old, ignore_errors=True)
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    needed_gb = DISK_NEEDED_GB[profile]
    if free_gb < needed_gb:
        fail(
            f"the {profile} profile needs about {needed_gb} GB of disk space, and {ROOT} has "
            f"{free_gb:.1f} GB left. Free some space, or clone the repository to a larger disk"
        )
    print(f"creating .venv with Python {platform.python_version()}", flush=True)
    venv.create(VENV, with_pip=True)


def forget_half_installed() -> None:
    """Remove the metadata of every package that is incomplete on disk: it is installed again."""
    for site_packages in VENV.glob("lib/python*/site-packages"):
        # An unfinished upgrade by pip leaves files that it was removing under such names.
        for leftover in site_packages.glob("~*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for metadata in site_packages.glob("*.dist-info"):
            if not is_whole(metadata):
                print(f"  installing again: {metadata.name.removesuffix('.dist-info')}")
                shutil.rmtree(metadata)


def is_whole(metadata: Path) -> bool:
    """True if the installer has finished, and each file has the size that RECORD lists.

    INSTALLER is what pip writes last, and uv after all that the wheel has. Bytecode is ignored,
    because Python rewrites it.
    """
    if not (metadata / "INSTALLER").exists():
        return False
    try:
        with open(metadata / "RECORD", newline="") as record:
            for name, _, size in csv.reader(record):
                if not size or name.endswith(".pyc"):
                    continue
                if (metadata.parent / name).stat().st_size != int(size):
                    return False
    except (OSError, ValueError):
        return False
    return True


def backend_of_torch(profile: str) -> dict[str, str]:
    """What sends uv to PyTorch's index of CPU builds: the default index has only those for CUDA."""
    if profile == "cpu" and not uv_environment().keys() & set(SOURCES):
        return {"UV_TORCH_BACKEND": "cpu"}
    return {}


def bytecode() -> dict[str, str]:
    """What has uv compile all modules, if Python may not keep the bytecode of those it imports.

    Each process would then compile again what it imports, for 8 seconds. All modules take 22.
    """
    return {"UV_COMPILE_BYTECODE": "1"} if sys.dont_write_bytecode else {}


def install(title: str, *arguments: str | Path, **variables: str) -> None:
    """Install with uv, or with pip where uv fails; the variables are for uv."""
    print(title, flush=True)
    if run_logged([*UV_INSTALL, *arguments], uv_environment() | variables) != 0:
        print(f"      uv failed, so pip takes its place ({LOG_FILE} says why)", flush=True)
        pip_install(*arguments)


def pip_install(*arguments: str | Path) -> None:
    """Install with pip, or end here."""
    if run_logged([*PIP_INSTALL, *arguments], os.environ) != 0:
        tail = "\n".join(LOG_FILE.read_text().splitlines()[-LOG_LINES_SHOWN:])
        fail(
            "pip failed. Run the same command to resume. Its last lines (all are in "
            f"{LOG_FILE}):\n\n{tail}"
        )


def pip_settings() -> dict[str, str]:
    """pip's options from its files and variables, each from where pip would take it."""
    command = [VENV_PYTHON, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    settings = {}
    for section in ("global.", "install.", ":env:."):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(section):
                settings[name.removeprefix(section)] = ast.literal_eval(value)
    return settings


def uv_environment() -> dict[str, str]:
    """This process's variables, and pip's settings as uv's where these are not set."""
    settings = pip_settings()
    translated = {}
    for option, (variable, separator) in UV_VARIABLES.items():
        if settings.get(option):
            translated[variable] = separator.join(settings[option].split())
    return translated | os.environ


def run_logged(command: Sequence[str | Path], environment: Mapping[str, str]) -> int:
    """Run a command with its output in the log file and now and then a line of it on the screen."""
    reported = time.monotonic()
    with (
        open(LOG_FILE, "a") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        for line in process.stdout or ():
            log.write(line)
            if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                print(f"      {line.strip()[:CHARACTERS_SHOWN]}", flush=True)
    return process.returncode


def fail(message: str) -> NoReturn:
    sys.exit(f"setup: {message}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; run the same command to resume")
