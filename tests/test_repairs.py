"""Each file that works around a fault of a library names its report, and has a last release."""

import importlib
import re
import subprocess
from configparser import ConfigParser

import pytest
from documents import ROOT
from packaging.requirements import Requirement
from packaging.version import Version
from tiny import tiny_model

from trl_qurl.lab.engine import start_engine
from trl_qurl.rollout import repairs
from trl_qurl.rollout.wire import WORKER_EXTENSION

FOLDER = ROOT / "trl_qurl" / "rollout" / "repairs"
TOGETHER = ("__init__", "in_worker")  # no repairs
REPAIRS = sorted({path.stem for path in FOLDER.glob("*.py")} - set(TOGETHER))
PAGE = ROOT / "docs" / "upstream.md"
LINK = "../trl_qurl/rollout/repairs/"


def reports():
    """The reports of the page, by number, and the text of each."""
    _, *parts = re.split(r"^###? (\d+)\. ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(map(int, parts[::2]), parts[1::2], strict=True))


def supported(library):
    """The lowest release of a library that setup.cfg allows, and the lowest that it excludes."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["install_requires"].splitlines()
    for extra in config["options.extras_require"].values():
        lines += extra.splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    [specifier] = [one.specifier for one in requirements if one.name == library and one.specifier]
    bounds = {bound.operator: Version(bound.version) for bound in specifier}
    return bounds[">="], bounds["<"]


def imported(name):
    return importlib.import_module(f"{repairs.__name__}.{name}")


@pytest.mark.parametrize("name", REPAIRS)
def test_a_repair_names_its_report(name):
    known = reports()
    repair = imported(name)
    assert repair.REPORTS
    for number in repair.REPORTS:
        assert number in known, f"docs/upstream.md has no report {number}"
        assert f"]({LINK}{name}.py)" in known[number], f"report {number} has no link to {name}.py"


@pytest.mark.parametrize("name", REPAIRS)
def test_a_repair_is_still_necessary_and_sought_in_every_release_that_is_allowed(name):
    repair = imported(name)
    library, seen = repair.SEEN_IN.split()
    lowest, excluded = supported(library)
    fixed = repair.UNNECESSARY_FROM
    if fixed is not None:
        assert lowest < Version(fixed), (
            f"setup.cfg requires {library} {lowest}, which has no fault since {fixed}: remove "
            f"{name}.py and its report."
        )
        return
    major, minor = Version(seen).release
    assert excluded <= Version(f"{major}.{minor + 1}"), (
        f"setup.cfg allows {library} below {excluded}, and the fault of {name}.py was last seen in "
        f"{seen}. Look whether it is still there, then change SEEN_IN or UNNECESSARY_FROM."
    )


@pytest.mark.parametrize("has_amx", [True, False])
def test_every_engine_on_a_cpu_with_amx_asks_for_it(has_amx, monkeypatch):
    """What the kernel allows then, only a CPU with AMX shows: every test with an engine fails there
    without this."""
    in_worker = imported("in_worker")
    asked = []
    monkeypatch.setattr("torch.cpu._init_amx", lambda: asked.append(True))
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx2": True, "amx_tile": has_amx})
    importlib.reload(in_worker)  # as vLLM imports the extension of its worker
    assert asked == [True] * has_amx


def test_the_engine_of_a_tool_imports_the_repairs(monkeypatch, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    monkeypatch.setattr("vllm.LLM", dict)
    engine = start_engine([], {"model": str(tmp_path)}, sequences=1, length=8)
    assert engine["worker_extension_cls"] == WORKER_EXTENSION


EXITS_WITH_PROCESS_GROUPS = """
import weakref
from unittest.mock import MagicMock
import torch.distributed as dist
from trl_qurl.rollout.repairs import finalizer

def at_exit(name):
    weakref.finalize(dist, lambda: print(name, dist.is_initialized()))

at_exit("at last")  # finalizers run newest first
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for name in ("first engine", "second engine"):
    finalizer.release_when_deleted(MagicMock())
    at_exit(name)
"""


def test_process_groups_outlive_the_engines_and_no_more(warm_python):
    """PyTorch warns of NCCL groups that nobody destroys."""
    command = [warm_python, "-c", EXITS_WITH_PROCESS_GROUPS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["second engine True", "first engine True", "at last False"]
