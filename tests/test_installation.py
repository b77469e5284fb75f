"""Installing as a new user does: the wheel has everything, and extras that are named exist."""

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import venv
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
        for line in re.findall(r"pip install ([^`\n#]+)", text):
            if "trl-qurl" in line:
                assert re.search(r"trl-qurl\S* @ |'trl-qurl\[|--no-index", line), path
        for extras in re.findall(r"(?:trl-qurl|'\.|\"\.)\[([a-z,]+)\]", text):
            assert {*extras.split(",")} <= setup["options.extras_require"].keys(), (path, extras)


def test_every_place_has_the_same_version():
    citation = (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {trl_qurl.__version__}\n" in citation
    assert re.search(r"^## \[(.+?)\]", changes, re.MULTILINE)[1] == trl_qurl.__version__


@pytest.mark.parametrize("path", sorted(ROOT.glob("Dockerfile*")), ids=lambda path: path.name)
def test_a_dockerfile_names_files_and_a_vllm_that_exist(path):
    text = path.read_text()
    for name in re.findall(r"requirements/\S+", text):
        assert (ROOT / name).exists(), name
    for version in re.findall(r"^ARG VLLM_VERSION=(.+)$", text, re.MULTILINE):
        assert f"\nvllm=={version}\n" in (ROOT / "requirements" / "gpu.lock").read_text()


@pytest.fixture(scope="module")
def release(tmp_path_factory):
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


@pytest.mark.slow
def test_an_installed_wheel_finds_its_recipes_and_its_extras(release, tmp_path):
    """In a new environment that takes all other packages from this one, without an index."""
    pytest.importorskip("math_verify", reason="needs math-verify (trl-qurl[math])")
    [wheel] = release.glob("*.whl")
    venv.create(tmp_path, with_pip=False)
    [packages] = tmp_path.glob("lib/python*/site-packages")
    others = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "others.pth").write_text(f"{others}\n")

    def run(line):
        program, *words = line.split()
        command = [tmp_path / "bin" / program, *words]
        path = {"PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(f"python -m pip install --no-index --no-deps --ignore-installed {wheel}")
    assert str(tmp_path) in run("python -c print(__import__('trl_qurl').__file__)")
    assert "gsm8k_ppo" in run("trl-qurl ppo --config gsm8k_ppo tis --use_cpu --bf16 false --help")
    run("trl-qurl demo --rollouts 2 --required-share -9 --output-dir demo")
    assert (tmp_path / "demo" / "demo.png").exists()
    said = run("python -m pip install --no-index trl-qurl[math]")
    assert "already satisfied: trl-qurl[math]" in said
    assert "math-verify" in said
