"""Installing as a new user does: the wheel has everything, and extras that are named exist."""

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
from documents import ROOT

import trl_qurl

NEEDED = "CHANGELOG.md CITATION.cff LICENSE MANIFEST.in PKG-INFO README.md SECURITY.md"
NEEDED += " pyproject.toml setup.cfg"


sys.path.insert(0, str(ROOT / "tools"))

import owner  # noqa: E402


def test_all_addresses_name_the_account_of_setup_cfg():
    files = owner.tracked_texts(ROOT)
    assert owner.other_owners(files, owner.present_owner(ROOT)) == []


def test_extras_exist_and_no_line_needs_a_release_on_an_index():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for path in owner.tracked_texts(ROOT):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install trl\Wqurl", text), path
        for extras in re.findall(r"trl-qurl\[([a-z,]+)\]", text):
            assert {*extras.split(",")} <= setup["options.extras_require"].keys(), (path, extras)


def test_every_place_has_the_same_version():
    citation, changes = ((ROOT / name).read_text() for name in ("CITATION.cff", "CHANGELOG.md"))
    assert f"\nversion: {trl_qurl.__version__}\n" in citation
    assert re.search(r"^## \[(.+?)\]", changes, re.MULTILINE)[1] == trl_qurl.__version__


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """Build an sdist, and a wheel from it."""
    pytest.importorskip("build", reason="needs build (trl-qurl[dev])")
    directory = tmp_path_factory.mktemp("release")
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, directory)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "trl_qurl", directory / "trl_qurl", ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    subprocess.run(command, check=True, capture_output=True, cwd=directory)
    return directory / "dist"


def test_sdist_and_wheel_have_every_file_of_the_package(release):
    [sdist] = release.glob("*.tar.gz")
    [wheel] = release.glob("*.whl")
    files = [path for path in (ROOT / "trl_qurl").rglob("*") if path.is_file()]
    package = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    assert "trl_qurl/lab/recipes/paper/variants/tis.yaml" in package
    with ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("trl_qurl/")} == package
    with tarfile.open(sdist) as archive:
        names = [member.name.partition("/")[2] for member in archive if member.isfile()]
    there = {name for name in names if ".egg-info/" not in name}
    assert there == package | set(NEEDED.split())
