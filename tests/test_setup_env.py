"""`make setup` on a small project of its own, whose packages are wheels in a folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import pytest
from documents import ROOT

pytestmark = pytest.mark.xdist_group("set-up")  # one clone for all
find_uv_bin = pytest.importorskip("uv", reason="needs uv (requirements/)").find_uv_bin

BACKEND = """
from pathlib import Path
from zipfile import ZipFile

def build_editable(directory, config_settings=None, metadata_directory=None):
    name = "ours-1-py3-none-any.whl"
    with ZipFile(Path(directory) / name, "w") as wheel:
        wheel.writestr("ours.pth", str(Path.cwd()))
        wheel.writestr("ours-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: ours\\nVersion: 1\\n")
        wheel.writestr("ours-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("ours-1.dist-info/RECORD", "")
    return name
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""

PIP_SETTINGS = """
[global]
no-index = true
index-url = http://127.0.0.1:1/
find-links = /nowhere
"""
# torch's build for CPUs has no dependency that the one for CUDA has; vLLM and llm-compressor
# contradict each other like engine and quantizer
PACKAGES = """\
torch 2 cuda_runtime
torch 2+cpu tensors
cuda_runtime 1
tensors 1
engine 1 quantizer==1
quantizer 2
quantizer 3"""


def make_wheel(folder, name, version, *requires, program=None):
    """A package of one module, with a program if one is given."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    for requirement in requires:
        metadata += f"Requires-Dist: {requirement}\n"
    files = {
        f"{name}.py": f"version = {version!r}\n".encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if program:
        files[f"{name}-{version}.data/scripts/{program.name}"] = program.read_bytes()
    record = "".join(f"{path},,{len(content)}\n" for path, content in files.items())
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            entry = ZipInfo(path)
            entry.external_attr = 0o100755 << 16
            wheel.writestr(entry, content)
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


class Clone:
    """A folder with the script, a lock file and pip's settings."""

    def __init__(self, folder):
        self.folder = folder
        self.wheels = folder / "wheels"
        for name in ("tools", "requirements", "wheels"):
            (folder / name).mkdir()
        shutil.copy(ROOT / "tools/setup_env.py", folder / "tools")
        (folder / "setup.cfg").touch()
        (folder / "pyproject.toml").write_text(PROJECT)
        (folder / "backend.py").write_text(BACKEND)
        # A file for some of pip's settings, a variable for what it is to overrule there.
        (folder / "pip.conf").write_text(PIP_SETTINGS)
        self.environment = {
            name: value for name, value in os.environ.items() if name[:3] not in ("PIP", "UV_")
        }
        self.settings = {
            "PIP_CONFIG_FILE": f"{folder}/pip.conf",
            "PIP_FIND_LINKS": str(self.wheels),
        }
        self.environment |= self.settings | {
            "UV_CACHE_DIR": f"{folder}/cache",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def lock(self, *lines):
        (self.folder / "requirements/cpu.lock").write_text("\n".join(lines) + "\n")

    def set_up(self):
        command = [sys.executable, "tools/setup_env.py", "--profile", "cpu"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def interrupt(self):
        """Make it look as if the last call had not come to its end."""
        state = self.folder / ".venv" / "trl-qurl-setup.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"complete": False}))

    def packages(self):
        [folder] = self.folder.glob(".venv/lib/python*/site-packages")
        return folder

    def installed(self):
        """The packages that a test made, each with its version and who installed it."""
        lines = []
        for info in self.packages().glob("*.dist-info"):
            package = info.name.removesuffix(".dist-info").replace("-", " ")
            if not package.startswith(("pip", "setuptools")):
                lines.append(f"{package} {(info / 'INSTALLER').read_text().strip()}")
        return "\n".join(sorted(lines))


@pytest.fixture(scope="module")
def uv_fails(tmp_path_factory):
    """A clone after a set-up with a uv that fails."""
    made = Clone(tmp_path_factory.mktemp("clone"))
    for line in PACKAGES.splitlines():
        make_wheel(made.wheels, *line.split())
    broken = made.folder / "uv"
    broken.write_text("#!/bin/sh\necho backend: $UV_TORCH_BACKEND\nexit 2\n")
    make_wheel(made.wheels, "uv", "1", program=broken)
    make_wheel(made.wheels, "uv", "2", program=Path(find_uv_bin()))
    made.lock("torch==2", "engine==1", "quantizer==2", "uv==1")
    made.said = made.set_up()
    made.pip = made.installed()
    made.log = made.folder / ".venv" / "trl-qurl-setup.log"
    made.backends = [made.log.read_text()]
    made.interrupt()
    made.environment |= {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    made.set_up()  # everything is there, so pip asks no index
    made.backends.append(made.log.read_text())
    made.environment |= made.settings
    return made


BY_PIP = """\
engine 1 pip
ours 1 pip
quantizer 2 pip
tensors 1 pip
torch 2+cpu pip
uv 1 pip"""


def test_pip_takes_the_place_of_a_uv_that_fails(uv_fails):
    assert uv_fails.said.count("uv failed, so pip takes its place") == 3
    assert uv_fails.pip == BY_PIP


def test_uv_is_sent_to_pytorchs_cpu_builds_unless_the_user_names_a_source(uv_fails):
    named, not_named = uv_fails.backends
    assert named.count("backend:\n") == 3
    assert not_named.count("backend: cpu\n") == 1


@pytest.fixture(scope="module")
def clone(uv_fails):
    """The same clone after an update of the lock file to a uv that works, and to another package."""
    uv_fails.lock("torch==2", "engine==1", "quantizer==3", "uv==2")
    uv_fails.said_later = uv_fails.set_up()
    uv_fails.uv = uv_fails.installed()
    return uv_fails


UPDATED = """\
engine 1 pip
ours 1 uv
quantizer 3 uv
tensors 1 pip
torch 2+cpu pip
uv 2 pip"""


def test_uv_installs_what_the_lock_file_changed_and_leaves_torch_alone(clone):
    assert "uv failed" not in clone.said_later
    assert clone.uv == UPDATED
    # what Python may not write later
    assert list(clone.packages().glob("__pycache__/quantizer.*.pyc"))
    assert clone.set_up() == ".venv is up to date (cpu profile)\n"


def test_the_next_call_completes_what_was_interrupted(clone):
    """A package whose file is half there, one whose last files are missing, torch not yet there."""
    clone.interrupt()
    packages = clone.packages()
    shutil.rmtree(packages / "torch-2+cpu.dist-info")
    for name in ("torch.py", "quantizer.py"):
        (packages / name).unlink()  # not changed in place: uv's cache has the same file
        (packages / name).write_text("ver")
    (packages / "engine-1.dist-info" / "INSTALLER").unlink()
    said = clone.set_up()
    assert "installing again: engine-1" in said
    assert "installing again: quantizer-3" in said
    assert (packages / "quantizer.py").read_text() == "version = '3'\n"
    assert (packages / "torch.py").read_text() == "version = '2+cpu'\n"
    assert {"torch 2+cpu uv", "engine 1 uv", "quantizer 3 uv"} <= {*clone.installed().split("\n")}
