"""Run the notebooks from the first cell to the last, with a tiny model and tiny sizes.

Only the cell of sizes is replaced. `trl-qurl eval`, the trainers and vLLM are real.
"""

import ast
import copy
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
from tiny import SHARED, layers_of, save_tiny, save_tokenizer, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from trl_qurl.lab.device import full_precision
from trl_qurl.lab.runs import read_run
from trl_qurl.quantization import SCHEMES
from trl_qurl.quantization.storage import read_tensors

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STORIES = SHARED / "models" / "stories260K"

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
on_gpus = pytest.mark.parametrize("path", NOTEBOOKS[:2], ids=lambda path: path.stem)

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
    """Answers `a+b=` with one of the digits 2, 3, 4 in a box:
    every third answer earns the reward.
    """
    model = tiny_model(max_position_embeddings=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = [f"{a}+{b}=\\boxed{{{c}}}<eos>" for a in "12" for b in "12" for c in "234"]
    ids = torch.tensor(tiny_tokenizer()(texts)["input_ids"])
    for _ in range(200):
        loss = model(
            input_ids=ids, labels=ids.masked_fill(torch.arange(ids.shape[1]) < 4, -100)
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A directory with a model that earns rewards, and questions for it."""
    directory = tmp_path_factory.mktemp("start")
    warm_model().save_pretrained(directory / "model")
    save_tokenizer(directory / "model", CHAT_TEMPLATE)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in (1, 2) for b in (1, 2)] * 8
    (directory / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def execute(path: Path, directory: Path, sizes: dict, python: Path | str) -> nbformat.NotebookNode:
    """Run the notebook with these sizes in a separate kernel, and return it with its outputs."""
    nbclient = pytest.importorskip(
        "nbclient", reason="needs nbclient and ipykernel (trl-qurl[test])"
    )
    import jupyter_client

    notebook = nbformat.read(path, 4)
    [cell] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    names = re.findall(r'^    "(\w+)":', cell.source, re.MULTILINE)
    assert sizes.keys() <= set(names), "sizes that the notebook does not have"
    cell.source += f"\nsizes |= {sizes!r}"
    # Not over TCP: a process that takes one of the chosen ports first makes the kernel wait
    # forever.
    kernel = jupyter_client.AsyncKernelManager(
        transport="ipc", ip=str(Path(python).parent / directory.name)
    )
    # A fork's parent is not who asked for it, and a kernel that has lost its parent ends.
    kernel.kernel_spec.argv = [
        str(python),
        *kernel.kernel_spec.argv[1:],
        "--IPKernelApp.parent_handle=0",
    ]
    places = {"metadata": {"path": str(directory)}}
    client = nbclient.NotebookClient(
        notebook, kernel, timeout=240, startup_timeout=240, resources=places
    )
    # pandas chose when it was imported to fit tables to a terminal, and a fork's may be narrow.
    environment = child_environment(VLLM_CPU_KVCACHE_SPACE="1", PYTHONPATH=str(ROOT), COLUMNS="200")
    client.execute(env=environment, cleanup_kc=True)
    return notebook


def shown(cell: nbformat.NotebookNode, kind: str) -> str:
    """All that a cell shows of one kind: `text/html`,
    `image/png`, or `stdout` for what it printed.
    """
    found = [output.data.get(kind, "") for output in cell.outputs if "data" in output]
    found += [output.text for output in cell.outputs if output.get("name") == kind]
    return "\n".join(found)


def the_cell(notebook: nbformat.NotebookNode, code: str) -> nbformat.NotebookNode:
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and code in cell.source]
    return cell


def evaluated(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    """Policy and format of each row in the table of accuracies."""
    table = shown(the_cell(notebook, 'evaluate("after INT8 rollouts"'), "text/html")
    return re.findall(
        r"<td>(start|after [\w-]+ rollouts)</td>\s*<td>(\w+)</td>\s*<td>[\d.]+</td>", table
    )


def assert_trained(directory: Path, start: Path, policy_directory: Path) -> None:
    """Check that the policy has changed, and that its 8-bit checkpoint holds the rounded policy."""
    [row] = [row for row in read_run(directory).rows if "reward" in row]
    assert row["step"] == 4 and 0 < row["reward"] < 1
    policy = AutoModelForCausalLM.from_pretrained(policy_directory)
    before = AutoModelForCausalLM.from_pretrained(start / "model").state_dict()
    served, stored = copy.deepcopy(policy), dict(read_tensors(directory / "int8"))
    for layer in layers_of(policy):
        assert not torch.equal(policy.get_submodule(layer).weight, before[f"{layer}.weight"]), layer
        codes = {part: stored.pop(f"{layer}.{part}") for part in ("weight", "weight_scale")}
        stored[f"{layer}.weight"] = SCHEMES["int8"].dequantize(codes)
    served.load_state_dict(stored, strict=False)  # without a tied head
    # The checkpoint is smoothed, so only the functions can be compared.
    exact, rounded = (model(torch.arange(10, 40)[None]).logits for model in (policy, served))
    torch.testing.assert_close(rounded, exact, rtol=0, atol=0.1 * exact.std().item())
    assert AutoTokenizer.from_pretrained(directory / "int8").chat_template == CHAT_TEMPLATE


# Running them
# --------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.xdist_group("notebooks")
def test_the_grpo_notebook(start, warm_python, tmp_path):
    pytest.importorskip("matplotlib")
    sizes = GSM8K | {
        "model": str(start / "model"),
        "train_questions": str(start / "sums.jsonl"),
        "generations": 4,
    }
    sizes |= {"test_questions": f"sums={start / 'sums.jsonl'}", "lora_rank": 4, "formats": "none"}
    notebook = execute(ROOT / "notebooks" / "gsm8k_grpo.ipynb", tmp_path, sizes, warm_python)

    assert_trained(tmp_path / "run" / "int8", start, tmp_path / "run" / "int8" / "policy")
    assert read_run(tmp_path / "run" / "16-bit").settings["rollout_quantization"] is None
    report = the_cell(notebook, "trl_qurl report")
    printed = re.sub(r"\x1b\[[\d;]*m", "", shown(report, "stdout"))  # a terminal's colors
    assert re.search(r"^ int8 .*^ 16-bit ", printed, re.DOTALL | re.MULTILINE)
    assert shown(report, "image/png")
    policies = ["start", "after INT8 rollouts", "after 16-bit rollouts"]
    assert evaluated(notebook) == list(product(policies, full_precision()[:1]))
    serving = shown(the_cell(notebook, "--max-model-len {"), "stdout")
    assert "api_server --model run/int8/int8 --max-model-len" in serving  # on a CPU
    assert shown(the_cell(notebook, "axes.errorbar("), "image/png")


@pytest.mark.slow  # test_ppo_training.py covers its trainer, and the test above how cells are run
@pytest.mark.vllm
@pytest.mark.xdist_group("notebooks")
def test_the_ppo_notebook(start, warm_python, tmp_path):
    pytest.importorskip("matplotlib")
    sizes = GSM8K | {
        "model": str(start / "model"),
        "train_questions": str(start / "sums.jsonl"),
        "lora_rank": 0,
    }
    sizes |= {"test_questions": f"sums={start / 'sums.jsonl'}"}
    notebook = execute(ROOT / "notebooks" / "gsm8k_ppo.ipynb", tmp_path, sizes, warm_python)

    assert_trained(tmp_path / "run" / "int8", start, tmp_path / "run" / "int8")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "run" / "int8" / "critic")
    assert critic.config.num_labels == 1
    critic_table = shown(the_cell(notebook, '"critic/value_clip_share"'), "text/html")
    assert re.search(r"<th>mean of the targets</th>\s*<td>0?\.\d+</td>", critic_table)
    assert evaluated(notebook) == list(
        product(["start", "after INT8 rollouts"], [full_precision()[0], "INT8"])
    )
    assert shown(the_cell(notebook, "right.errorbar("), "image/png")


@pytest.mark.xdist_group("notebooks")
def test_the_notebook_that_explains_the_method(warm_python, tmp_path):
    pytest.importorskip("matplotlib")
    model = STORIES
    if not STORIES.exists():  # random weights that are spread enough for different continuations
        model = save_tiny(tmp_path / "model", initializer_range=0.15)
    sizes = {"model": str(model), "continuations": 16, "tokens": 12}
    notebook = execute(
        ROOT / "notebooks" / "understanding_qurl.ipynb", tmp_path, sizes, warm_python
    )

    drawn = [
        cell for cell in notebook.cells if cell.cell_type == "code" and "plt.show()" in cell.source
    ]
    assert len(drawn) == 6 and all(shown(cell, "image/png") for cell in drawn)
    # Rounding to fewer codes moves a policy more.
    mismatch = shown(the_cell(notebook, '"KL, k3": (rho'), "text/plain")
    _, int8, int4 = map(float, re.search(r"KL, k3 +(\S+) +(\S+) +(\S+)", mismatch).groups())
    assert 0 < int8 < int4
    # Shared rounded weights remove a part of it.
    left = shown(the_cell(notebook, 'WAYS = ("exact", "round_base")'), "text/plain")
    ways = [
        tuple(map(float, row))
        for row in re.findall(r"(?:exact|round_base) +(\S+) +(\S+) +(\S+)", left)
    ]
    exact, rounded = ways
    assert all(1e-9 < r < e for e, r in zip(exact, rounded, strict=True))
    # AdamW: s. Gradient descent: s². Powers of two do not change codes.
    lifts = shown(the_cell(notebook, "gradient descent: lift"), "text/plain")
    adamw, descent = map(float, re.search(r"s = 2 +\S+ +(\S+) +(\S+)", lifts).groups())
    assert adamw == pytest.approx(2, rel=0.02) and descent == pytest.approx(4, rel=0.02)
    assert re.search(
        r"s = 2\.0 .* differ 0\.0000 %", shown(the_cell(notebook, "scale_model_"), "stdout")
    )


# What is in the repository
# -----------------------------------------------------------------------------------------


@each
def test_stored_outputs_come_from_one_run_and_links_exist(path):
    nbformat.validate(nbformat.read(path, 4))
    executed = cells(path)
    counts = [cell.execution_count for cell in executed]
    assert counts == list(range(1, len(executed) + 1))
    for cell in executed:
        assert all(
            output.get("name") != "stderr" and output.output_type != "error"
            for output in cell.outputs
        )
    assert not re.search(
        r"/(tmp|home|root|work|usr)/", "".join(shown(cell, "stdout") for cell in executed)
    )
    assert path.stat().st_size < 1.5e6
    for cell in cells(path, "markdown"):
        for target in re.findall(r"\]\(([^)]+)\)", cell.source):
            assert (
                re.match(r"https?:", target) or (path.parent / target.partition("#")[0]).exists()
            ), target


# Installing for a GPU
# ------------------------------------------------------------------------------------------------

CUDA_12 = [
    "--torch-backend=cu129",
    "vllm @ https://github.com/vllm-project/vllm/releases/download/v0.31.0/"
    "vllm-0.31.0+cu129-cp38-abi3-manylinux_2_28_x86_64.whl",
]
REPLACED = [
    f"--reinstall-package={name}" for name in ("torch", "torchvision", "torchaudio", "torchcodec")
]


def choose_builds(path: Path, *machine: str | None) -> list[str] | str:
    """The function of the notebook's first cell, which runs without the rest of it."""
    tree = ast.parse(cells(path)[0].source)
    constants = [
        n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]).isupper()
    ]
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    names: dict = {}
    exec(compile(ast.Module(constants + functions, []), path.name, "exec"), names)
    return names["choose_builds"](*machine)


@on_gpus
@pytest.mark.parametrize(
    "driver, capability, torch_build, expected",
    [
        # a T4 on Colab: its torch of another version is replaced
        ("550.54.15", "7.5", "2.11.0+cu128", CUDA_12),
        ("550.54.15", "8.9", "2.13.0+cu129", CUDA_12),  # an L4, with the right torch
        ("535.129.03", "9.0", None, CUDA_12),
        ("525.60.13", "8.0", "2.13.0", CUDA_12 + REPLACED),  # the default build is for CUDA 13
        ("580.65.06", "7.5", None, []),
        ("590.44.01", "12.0", "2.13.0+cu130", []),
        ("580.65.06", "7.5", "2.13.0+cu128", REPLACED),  # pip would keep it: its version fits
    ],
)
def test_the_builds_fit_the_driver(path, driver, capability, torch_build, expected):
    qurl, *rest = choose_builds(path, driver, capability, torch_build)
    assert qurl.startswith("trl-qurl[vllm,") and rest == expected


@on_gpus
def test_the_first_cell_installs_the_chosen_builds_or_stops(path, tmp_path):
    """Run the whole cell in a Python without packages, with doubles of `nvidia-smi` and of pip."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word" >> {tmp_path}/said; done\n')
    smi = tmp_path / "nvidia-smi"
    code = f"import sys\nsys.executable = {str(python)!r}\n{cells(path)[0].source}"

    def run(answer: str) -> subprocess.CompletedProcess:
        smi.write_text(f"#!/bin/sh\n{answer}\n")
        for stand_in in (smi, python):
            stand_in.chmod(0o755)
        command = [sys.executable, "-I", "-S", "-c", code]
        return subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)

    for answer in (
        "exit 6",
        "echo No devices were found; exit 6",
        "echo 470.57.02, 7.5, 15360, Tesla T4",
    ):
        done = run(answer)
        [line] = done.stderr.splitlines()
        assert done.returncode == 1 and ": choose " in line and not (tmp_path / "said").exists()
    assert run("echo 550.54.15, 7.5, 15360, Tesla T4").returncode == 0
    words = (tmp_path / "said").read_text().splitlines()
    assert words[:5] == ["-m", "pip", "install", "-q", "uv"]
    assert (
        words[5:11] == ["-m", "uv", "pip", "install", "--python", str(python)]
        and words[12:] == CUDA_12
    )


def test_the_pinned_build_of_vllm_is_the_one_of_the_lock_file():
    [version] = re.findall(
        r"^vllm==(\S+)$", (ROOT / "requirements" / "gpu.in").read_text(), re.MULTILINE
    )
    assert f"/vllm-{version}+cu129-" in CUDA_12[1]
    assert CUDA_12[1] in (ROOT / "docs" / "installation.md").read_text()
