"""Installing as a new user does: the wheel has everything, and every line that installs the package
would work.
"""

import configparser
import json
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
from documents import PAGES, ROOT

import trl_qurl

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
ADDRESS = SETUP["metadata"]["url"]
"""Of the repository; everything else repeats it."""

FORMS = {
    "in a clone": r"'?\.(?:\[[\w,]+\])?'?",
    "from the repository's "
    "address": rf"['\"]trl-qurl(?:\[[\w,]+\])? @ {re.escape('git+' + ADDRESS)}['\"]",
    # quoted, because zsh expands brackets
    "an extra, once it is installed": r"'trl-qurl\[[\w,{}]+\]'",
}


def lines_that_install() -> list[tuple[str, str]]:
    """Everything that is said to be installed with pip, in pages, examples, notebooks, Dockerfiles
    and messages.
    """
    sources = [
        *PAGES,
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("notebooks/*.ipynb"),
        *ROOT.glob("trl_qurl/**/*.py"),
    ]
    found = []
    for path in sources:
        text = path.read_text()
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        # A message may continue in the string of the next line.
        text = re.sub(r'"\n\s*f?"', "", text) if path.suffix == ".py" else text
        found += [(path.name, line) for line in re.findall(r"pip install ([^`\n#]+)", text)]
        # The first cells of notebooks for GPUs build their command from this.
        found += [
            (path.name, line)
            for line in re.findall(r'^QURL = ("trl-qurl[^\n]+)', text, re.MULTILINE)
        ]
    return found


def test_every_pip_line_works_without_a_release_on_an_index():
    found = lines_that_install()
    ours = [
        (name, line)
        for name, line in found
        if "trl-qurl" in line or re.search(r"(^|[\s'])\.(\[|\s|'|$)", line)
    ]
    assert len(ours) > 20
    for name, line in ours:
        assert any(re.search(rf"(^|\s){form}(\s|$|[.,);])", line) for form in FORMS.values()), (
            f"{name}: {line}"
        )
        for extras in re.findall(r"(?:trl-qurl|\.)\[([\w,]+)\]", line):
            assert set(extras.split(",")) <= known_extras(), f"{name}: {line}"


def known_extras() -> set[str]:
    return set(SETUP["options.extras_require"])


def test_every_place_has_the_same_version():
    assert (
        re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
        == trl_qurl.__version__
    )
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == trl_qurl.__version__


@pytest.mark.parametrize("path", sorted(ROOT.glob("Dockerfile*")), ids=lambda path: path.name)
def test_a_dockerfile_installs_extras_and_files_that_exist(path):
    text = path.read_text()
    for extras in re.findall(r"\.\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= known_extras()
    assert all((ROOT / name).exists() for name in re.findall(r"requirements/\S+", text))
    for version in re.findall(r"^ARG VLLM_VERSION=(.+)$", text, re.MULTILINE):
        assert f"\nvllm=={version}\n" in (ROOT / "requirements" / "gpu.lock").read_text()


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """Build an sdist, and a wheel from it."""
    pytest.importorskip("build", reason="needs build (trl-qurl[dev])")
    directory = tmp_path_factory.mktemp("release")
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, directory)
    shutil.copytree(
        ROOT / "trl_qurl", directory / "trl_qurl", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        directory / "dist",
        directory,
    ]
    subprocess.run(build, check=True, capture_output=True, cwd=directory)
    return directory / "dist"


@pytest.fixture(scope="module")
def wheel(release) -> Path:
    [wheel] = release.glob("*.whl")
    return wheel


def files_of_the_package() -> set[Path]:
    files = (
        path for path in (ROOT / "trl_qurl").rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
    return {path.relative_to(ROOT) for path in files}


def test_the_wheel_has_every_file_of_the_package(wheel):
    there = {Path(name) for name in ZipFile(wheel).namelist() if name.startswith("trl_qurl/")}
    assert there == files_of_the_package()
    assert Path("trl_qurl/lab/recipes/paper/variants/tis.yaml") in there


def test_the_sdist_has_the_package_and_what_a_reader_needs(release):
    [sdist] = release.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {
            Path(*Path(name).parts[1:])
            for name in archive.getnames()
            if archive.getmember(name).isfile()
        }
    there = {path for path in files if not path.parts[0].endswith(".egg-info")}
    names = {
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "SECURITY.md",
    }
    assert there == files_of_the_package() | {
        Path(name) for name in names | {"pyproject.toml", "setup.cfg"}
    }


@pytest.mark.slow
def test_an_installed_wheel_finds_its_recipes_and_its_extras(wheel, tmp_path):
    """In a new environment that takes all other packages from this one; nothing is looked up in an
    index.
    """
    pytest.importorskip("math_verify", reason="needs math-verify (trl-qurl[math])")
    venv.create(tmp_path, with_pip=False)
    [packages] = tmp_path.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(
        next(path for path in sys.path if path.endswith("site-packages")) + "\n"
    )

    def run(program: str, *words: str | Path) -> str:
        command, environment = [tmp_path / "bin" / program, *words], {"PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("python", "-m", "pip", "install", "--no-index", "--no-deps", "--ignore-installed", wheel)
    place = run(
        "python", "-c", "import trl_qurl.lab.recipes.arguments as files; print(files.__file__)"
    )
    assert place.startswith(str(tmp_path)), "this checkout was imported"
    said = run(
        "trl-qurl", "ppo", "--config", "gsm8k_ppo", "tis", "--use_cpu", "--bf16", "false", "--help"
    )
    assert "gsm8k_ppo" in said
    said = run(
        "trl-qurl", "demo", "--rollouts", "2", "--required-share", "-9", "--output-dir", "demo"
    )
    assert "the stored 16-bit run solved" in said and (tmp_path / "demo" / "demo.png").exists()
    said = run("python", "-m", "pip", "install", "--no-index", "trl-qurl[math]")
    assert "Requirement already satisfied: trl-qurl[math]" in said and "math-verify" in said
