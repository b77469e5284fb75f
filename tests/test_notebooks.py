"""The notebooks as a reader runs them, from the first cell to the last, on a tiny model and with tiny sizes.

Nothing but the cell of sizes is replaced. What the notebooks start is real: `trl-qurl eval`, the trainers, vLLM; only
the `python` of the kernel, and so of what it starts, has imported everything before (`forks`).
"""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from conftest import child_environment
from tiny import SHARED, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from trl_qurl.lab.device import full_precision
from trl_qurl.quantization import SCHEMES, quantized_layer_names
from trl_qurl.quantization.storage import read_tensors
from trl_qurl.trainers.run_log import read_run

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STORIES = SHARED / "models" / "stories260K"

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

# The first line of a question; the instruction below it would make up most of a tiny model's work.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'].split('\\n')[0] }}{% endfor %}"

GSM8K = {
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


def cells(path: Path, kind: str = "code") -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == kind]


def warm_model() -> torch.nn.Module:
    """Answers `a+b=` with one of the digits 2, 3, 4 in a box: every third answer earns the reward."""
    model = tiny_model(max_position_embeddings=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = [f"{a}+{b}=\\boxed{{{c}}}<eos>" for a in "12" for b in "12" for c in "234"]
    ids = torch.tensor(tiny_tokenizer()(texts)["input_ids"])
    for _ in range(200):
        loss = model(input_ids=ids, labels=ids.masked_fill(torch.arange(ids.shape[1]) < 4, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A directory with a model that earns rewards, and questions for it."""
    directory = tmp_path_factory.mktemp("start")
    warm_model().save_pretrained(directory / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory / "model")
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in (1, 2) for b in (1, 2)] * 8
    (directory / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def execute(path: Path, directory: Path, sizes: dict, python: Path | str) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in a kernel of its own with these sizes."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (trl-qurl[test])")
    import jupyter_client

    notebook = nbformat.read(path, 4)
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    names = re.findall(r'^    "(\w+)":', cell.source, re.MULTILINE)
    assert sizes.keys() <= set(names), "sizes that the notebook does not have"
    # What is not given stays as it is, so that a size that is new in the notebook needs no change here.
    cell.source += f"\nsizes |= {sizes!r}"
    kernel = jupyter_client.AsyncKernelManager(kernel_name="python3")
    # A fork's parent is not who asked for it, and a kernel that has lost its parent ends.
    kernel.kernel_spec.argv = [str(python), *kernel.kernel_spec.argv[1:], "--IPKernelApp.parent_handle=0"]
    client = nbclient.NotebookClient(notebook, kernel, timeout=240, resources={"metadata": {"path": str(directory)}})
    environment = child_environment(VLLM_CPU_KVCACHE_SPACE="1", PYTHONPATH=str(ROOT))
    client.execute(env=environment, cleanup_kc=True)
    return notebook


def shown(cell: nbformat.NotebookNode, kind: str) -> str:
    """All that a cell shows of one kind: `text/html`, `image/png`, or `stdout` for what it printed."""
    found = [output.data.get(kind, "") for output in cell.outputs if "data" in output]
    found += [output.text for output in cell.outputs if output.get("name") == kind]
    return "\n".join(found)


def the_cell(notebook: nbformat.NotebookNode, code: str) -> nbformat.NotebookNode:
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and code in cell.source]
    return cell


def assert_trained(directory: Path, start: Path, sizes: dict) -> None:
    """The policy has moved, and its 8-bit checkpoint holds just that policy, rounded."""
    [row] = [row for row in read_run(directory).rows if "reward" in row]
    assert row["step"] == 4 and 0 < row["reward"] < 1
    policy = AutoModelForCausalLM.from_pretrained(directory / "policy")
    before = AutoModelForCausalLM.from_pretrained(start / "model").state_dict()
    served, stored = copy.deepcopy(policy), dict(read_tensors(directory / "int8"))
    for layer in quantized_layer_names(policy):
        assert not torch.equal(policy.get_submodule(layer).weight, before[f"{layer}.weight"]), layer
        codes = {part: stored.pop(f"{layer}.{part}") for part in ("weight", "weight_scale")}
        stored[f"{layer}.weight"] = SCHEMES["int8"].dequantize(codes)
    served.load_state_dict(stored, strict=False)  # without a tied head
    # The checkpoint is smoothed, so only the functions can be compared.
    exact, rounded = (model(torch.arange(10, 40)[None]).logits for model in (policy, served))
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.1 * exact.std().item())
    config = json.loads((directory / "int8" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
    assert AutoTokenizer.from_pretrained(directory / "int8").chat_template == CHAT_TEMPLATE


# Running them --------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.xdist_group("notebooks")
def test_grpo_from_the_first_cell_to_the_last(start, warm_python, tmp_path):
    pytest.importorskip("matplotlib")
    questions = start / "sums.jsonl"
    sizes = GSM8K | {"model": str(start / "model"), "train_questions": str(questions), "generations": 4}
    sizes |= {"test_questions": f"sums={questions}", "lora_rank": 4, "formats": "none"}  # both: in the test of PPO
    path = ROOT / "notebooks" / "gsm8k_grpo.ipynb"
    notebook = execute(path, tmp_path, sizes, warm_python)

    assert_trained(tmp_path / "run" / "int8", start, sizes)
    assert read_run(tmp_path / "run" / "16-bit").settings["rollout_quantization"] is None
    sixteen_bit, _ = full_precision()
    assert re.search(r"4/4  reward \S+  KL", (tmp_path / "run" / "int8.log").read_text())
    compared = the_cell(notebook, "trl_qurl report")
    printed = re.sub(r"\x1b\[[\d;]*m", "", shown(compared, "stdout"))  # a terminal's colors
    assert re.search(r"INT8 +1 .*16 bits +1 ", printed, re.DOTALL) and shown(compared, "image/png")
    table = shown(the_cell(notebook, 'evaluate("after INT8 rollouts"'), "text/html")
    rows = re.findall(r"<td>(start|after [\w-]+ rollouts)</td>\s*<td>(\w+)</td>\s*<td>([\d.]+)</td>", table)
    policies = ("start", "after INT8 rollouts", "after 16-bit rollouts")
    assert [row[:2] for row in rows] == [(policy, sixteen_bit) for policy in policies]
    assert "api_server --model run/int8/int8 --max-model-len" in shown(notebook.cells[-2], "stdout")  # on a CPU


@pytest.mark.slow  # what its trainer does is in test_ppo_training.py, and how cells are run above
@pytest.mark.vllm
@pytest.mark.xdist_group("notebooks")
def test_ppo_from_the_first_cell_to_the_last(start, warm_python, tmp_path):
    pytest.importorskip("matplotlib")
    questions = start / "sums.jsonl"
    sizes = GSM8K | {"model": str(start / "model"), "train_questions": str(questions), "lora_rank": 0}
    sizes |= {"test_questions": f"sums={questions}"}
    path = ROOT / "notebooks" / "gsm8k_ppo.ipynb"
    notebook = execute(path, tmp_path, sizes, warm_python)

    assert_trained(tmp_path / "run" / "int8", start, sizes)
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "run" / "int8" / "critic")
    assert critic.config.num_labels == 1
    assert re.search(r"4/4  reward \S+  KL \S+  critic", (tmp_path / "run" / "int8.log").read_text())
    critic_table = shown(the_cell(notebook, '"critic/explained_variance"'), "text/html")
    assert re.search(r"<th>mean of the targets</th>\s*<td>0?\.\d+</td>", critic_table)
    table = shown(the_cell(notebook, 'evaluate("after INT8 rollouts"'), "text/html")
    rows = re.findall(r"<td>(start|after INT8 rollouts)</td>\s*<td>(\w+)</td>\s*<td>([\d.]+)</td>", table)
    formats = (full_precision()[0], "INT8")
    policies = ("start", "after INT8 rollouts")
    assert [row[:2] for row in rows] == [(policy, format) for policy in policies for format in formats]


@pytest.mark.vllm
@pytest.mark.xdist_group("colocated")
def test_understanding_from_the_first_cell_to_the_last(tmp_path):
    pytest.importorskip("matplotlib")
    model = STORIES
    if not STORIES.exists():  # a model of random weights, whose continuations differ as those of a real one do
        model = tmp_path / "model"
        tiny_model(initializer_range=0.15).save_pretrained(model)
        tiny_tokenizer().save_pretrained(model)
    tiny_model("llama", max_position_embeddings=256).save_pretrained(tmp_path / "chat model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "chat model")
    sizes = {"model": str(model), "continuations": 16, "tokens": 12, "chat_model": "'chat model'", "rollouts": 1}
    notebook = execute(ROOT / "notebooks" / "understanding_qurl.ipynb", tmp_path, sizes, sys.executable)

    drawn = [cell for cell in notebook.cells if cell.cell_type == "code" and "plt.show()" in cell.source]
    assert len(drawn) == 6 and all(shown(cell, "image/png") for cell in drawn)
    # Rounding to fewer codes moves a policy further.
    mismatch = shown(the_cell(notebook, '"KL, k3": (rho'), "text/plain")
    _, int8, int4 = map(float, re.search(r"KL, k3 +(\S+) +(\S+) +(\S+)", mismatch).groups())
    assert 0 < int8 < int4
    # Shared rounded weights leave a part of it.
    left = shown(the_cell(notebook, "policy_like(scheme, way)"), "text/plain")
    ways = [tuple(map(float, row)) for row in re.findall(r"(?:exact|round_base) +(\S+) +(\S+) +(\S+)", left)]
    exact, rounded = ways
    assert all(1e-9 < r < e for e, r in zip(exact, rounded, strict=True))
    # AdamW: s. Gradient descent: s². Powers of two change no code by themselves.
    lifts = shown(the_cell(notebook, "gradient descent: lift"), "text/plain")
    adamw, descent = map(float, re.search(r"s = 2 +\S+ +(\S+) +(\S+)", lifts).groups())
    assert adamw == pytest.approx(2, rel=0.02) and descent == pytest.approx(4, rel=0.02)
    assert re.search(r"s = 2\.0 .* differ 0\.0000 %", shown(the_cell(notebook, "scale_model_"), "stdout"))
    # A chat model learns from an engine's rollouts.
    demo = the_cell(notebook, "trl_qurl demo")
    printed = " ".join(re.sub(r"\x1b\[[\d;]*m", "", shown(demo, "stdout")).split())  # a terminal's colors
    assert "0.00 before, 0.00 after 1 rollouts" in printed and shown(demo, "image/png")


# What is in the repository -----------------------------------------------------------------------------------------


@each
def test_outputs_are_cleared_and_metadata_is_clean(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook.metadata.keys() <= {"kernelspec", "language_info", "colab", "accelerator"}
    for cell in notebook.cells:
        assert cell.metadata.keys() <= {"tags"}
        assert cell.source.strip() == cell.source
    for cell in cells(path):
        assert cell.outputs == [] and cell.execution_count is None


@each
def test_the_first_cell_has_the_badge_and_one_holds_the_sizes(path):
    notebook = nbformat.read(path, 4)
    first = notebook.cells[0].source + cells(path)[0].source
    address = rf"\(https://colab.research.google.com/github/(\S+)/blob/main/notebooks/{path.name}\)"
    assert re.findall(address, first) == re.findall(r"git\+https://github.com/([^\s\"]+)", first) != []
    assert "pip install" in cells(path)[0].source and " profile" in cells(path)[0].source
    [tagged] = [cell for cell in notebook.cells if cell.metadata.get("tags")]
    assert tagged.metadata.tags == ["parameters"] and tagged.source.startswith("sizes = {")


@each
def test_nothing_is_installed_where_the_package_is_there(path):
    [line] = [line for line in cells(path)[0].source.splitlines() if "pip install" in line]
    assert line.startswith("    %pip") and 'find_spec("trl_qurl") is None' in cells(path)[0].source


@pytest.mark.parametrize("name", ["gsm8k_grpo", "gsm8k_ppo"])
def test_without_a_gpu_nothing_is_installed_that_would_not_run(name):
    source = cells(ROOT / "notebooks" / f"{name}.ipynb")[0].source
    code, _, _ = source.partition('if importlib.util.find_spec("trl_qurl") is None:')
    command = [sys.executable, "-I", "-S", "-c", code]  # a Python without packages
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 1 and "RuntimeError: This machine has no GPU. On Colab choose one: " in done.stderr


@pytest.mark.parametrize("name", ["gsm8k_grpo", "gsm8k_ppo"])
def test_nothing_is_installed_that_the_driver_cannot_run(name, tmp_path):
    source = cells(ROOT / "notebooks" / f"{name}.ipynb")[0].source
    code, _, _ = source.partition('if importlib.util.find_spec("trl_qurl") is None:  # on Colab')
    smi = tmp_path / "nvidia-smi"
    for driver in ("550.54.15", "580.65.06"):
        smi.write_text(f"#!/bin/sh\necho Tesla T4, 15360, 7.5, {driver}\n")
        smi.chmod(0o755)
        command = [sys.executable, "-I", "-S", "-c", code]  # a Python without packages
        done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
        assert done.returncode == (driver < "580"), done.stderr
        assert ("driver is 550.54.15" in done.stderr and "docs/installation.md" in done.stderr) == (driver < "580")


@each
def test_links_lead_to_files(path):
    for cell in cells(path, "markdown"):
        for target in re.findall(r"\]\(([^)]+)\)", cell.source):
            assert re.match(r"https?:", target) or (path.parent / target).exists(), target


def test_all_notebooks_are_run_here():
    assert {path.stem for path in NOTEBOOKS} == {"gsm8k_grpo", "gsm8k_ppo", "understanding_qurl"}
