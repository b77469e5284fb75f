"""The pull requests in docs/upstream/ apply to the TRL that is installed, and pass their tests."""

import os
import shutil
from pathlib import Path

import pytest
import trl
from conftest import completed
from documents import ROOT, links
from packaging.version import Version

DOCS = ROOT / "docs"
PATCHES = sorted(DOCS.glob("upstream/*.patch"))

needs_their_trl = pytest.mark.skipif(
    Version(trl.__version__).release[:2] != (1, 16), reason="the patches are for TRL 1.16"
)

RUN_TESTS = """
import sys
import pytest

for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
    del sys.modules[name]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests"]))
"""


def apply(patch, directory):
    # Below a repository, git would look for the files in that repository.
    completed("git", "apply", patch, cwd=directory, GIT_CEILING_DIRECTORIES=str(directory.parent))


@pytest.fixture
def copy(tmp_path):
    """A directory with a copy of TRL."""
    package = Path(trl.__file__).parent
    shutil.copytree(package, tmp_path / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@needs_their_trl
def test_pull_requests_pass_their_tests(warm_python, copy):
    for patch in PATCHES:
        apply(patch, copy)
    path = f"{copy}{os.pathsep}{ROOT}"
    completed(warm_python, "-c", RUN_TESTS, cwd=copy, PYTHONPATH=path)


def test_the_page_links_every_pull_request():
    linked = [link for link in links(DOCS / "upstream.md") if link.endswith(".patch")]
    assert sorted(DOCS / link for link in linked) == PATCHES
