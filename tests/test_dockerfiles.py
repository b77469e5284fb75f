"""Checks of the Dockerfiles that need no Docker daemon (`tools/run_dockerfile.py` runs one)."""

import configparser
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

TOOL = ROOT / "tools" / "run_dockerfile.py"
spec = importlib.util.spec_from_file_location("run_dockerfile", TOOL)
run_dockerfile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run_dockerfile)


def values(path: Path, name: str) -> list[str]:
    return [instruction.value for instruction in run_dockerfile.parse(path.read_text()) if instruction.name == name]


@pytest.mark.parametrize("path", sorted(ROOT.glob("Dockerfile*")), ids=lambda path: path.name)
def test_files_extras_and_the_program_exist(path):
    sent = {str(file) for file in run_dockerfile.context_files(ROOT)}
    assert {"setup.cfg", "README.md", "trl_qurl/__init__.py", "trl_qurl/lab/recipes/paper/dapo.yaml"} <= sent
    assert not any(name.startswith((".git/", ".venv/", "benchmarks/objectives/runs/")) for name in sent)
    for copied in values(path, "COPY"):
        *sources, _ = copied.split()
        assert all(source == "." or source in sent for source in sources)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    installed = " ".join(values(path, "RUN"))
    for extras in re.findall(r"\.\[([\w,]+)\]", installed):
        assert set(extras.split(",")) <= set(setup["options.extras_require"])
    assert all((ROOT / name).exists() for name in re.findall(r"requirements/\S+", installed))
    assert values(path, "ENTRYPOINT") == ['["trl-qurl"]'] and values(path, "CMD") == ['["--help"]']


def test_the_image_has_the_version_that_the_lock_file_has():
    path = ROOT / "Dockerfile"
    assert values(path, "FROM") == ["vllm/vllm-openai:v${VLLM_VERSION}${CUDA}"]
    [version] = re.findall(r"^ARG VLLM_VERSION=(.+)$", path.read_text(), re.MULTILINE)
    assert f"\nvllm=={version}\n" in (ROOT / "requirements" / "gpu.lock").read_text()
    assert values(path, "ARG").count("VLLM_VERSION") == 1, "an ARG before FROM is not known after it"


@pytest.mark.slow
def test_a_dockerfile_runs_in_a_new_environment(tmp_path):
    """The tool itself: each instruction, on a file whose outcome is visible; the last command fails."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "kept.txt").write_text("kept")
    (tmp_path / "left.pyc").write_text("left out")
    (tmp_path / ".dockerignore").write_text("# nothing compiled\n*.pyc\n")
    (tmp_path / "Dockerfile").write_text(
        "ARG NAME=default\nFROM nowhere:${NAME}\n# a comment\nENV GREETING=hello\nARG NAME\n"
        "RUN apt-get update && apt-get install nothing\nWORKDIR /opt/app\nCOPY . .\nCOPY sub/kept.txt moved.txt\n"
        'RUN test ! -e left.pyc && \\\n    cat sub/kept.txt moved.txt > "$GREETING-${NAME}.txt"\n'
        'RUN python -c "import sys; assert sys.prefix != sys.base_prefix"\n'
        'ENTRYPOINT ["sh", "-c", "cat $0; exit 3"]\nCMD ["hello-given.txt"]\n'
    )
    command = [sys.executable, TOOL, "Dockerfile", "--build-arg", "NAME=given"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "skipped: packages of the system" in done.stdout and done.stdout.endswith("keptkept"), done.stderr
    assert done.returncode == 1 and "failed with exit status 3" in done.stderr


@pytest.mark.slow
def test_the_cpu_image_can_be_built(tmp_path):
    """Runs each RUN line of Dockerfile.cpu: several GB from the package index, or minutes with local wheels."""
    command = [sys.executable, TOOL, ROOT / "Dockerfile.cpu", "--keep", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "usage: trl-qurl" in done.stdout
