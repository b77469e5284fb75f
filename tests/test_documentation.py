"""What the documentation says, held against the code: Python blocks, names, fields, metrics, messages, links.

Commands are in tests/test_documented_commands.py, the site and its reference in tests/test_site.py.

Every Python block is run. Blocks that train a model of the Hub run with doubles: the configuration is the real one, a
trainer checks its arguments and the calls of its methods against the real signatures and trains nothing, and data sets
of the Hub have two rows.
"""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
from itertools import pairwise
from typing import Any

import datasets
import pytest
import torch
from documents import PAGES, ROOT, SITE, Block, all_blocks, anchors, blocks, inline_code, links, rows
from trl import GRPOConfig, GRPOTrainer

import trl_qurl
from trl_qurl import (
    QuRLGRPOConfig,
    QuRLGRPOTrainer,
    QuRLPPOConfig,
    QuRLPPOTrainer,
    QuRLRLOOConfig,
    QuRLRLOOTrainer,
)

DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "trl_qurl").rglob("*.py"))
TRAINERS = (QuRLGRPOTrainer, QuRLPPOTrainer, QuRLRLOOTrainer)
NO_FILES = {"settings.yaml", "mismatch.yaml", "other.yaml", "utils.py", "helpers.py"}
"""Files that the text makes up, or forbids."""

OTHERS = {
    "No package metadata was found for vllm",  # Python's
    "'Parameter' object has no attribute 'weight_loader'",
    "NUMA binding: Using MEMBIND policy",
    "Triton is installed, but ",  # its second half is in code of its own
    " could not be imported",
    "No accelerator available! Compressing model on CPU instead",
    "torch.distributed.reduce_op is deprecated",
    "Loading safetensors checkpoint shards",
    "SECURITY WARNING: Development endpoints are enabled!",
    "TRL currently supports vLLM versions from",
    "0 active drivers ([]). There should only be one",
    "int8_scaled_mm_with_quant: expect A to be bfloat16 or half",
    "mat1 must be a 2D tensor",
    "less than desired CPU memory utilization",
    "torch.compile is turned on, but the model … does not support it",
}
"""Messages on the page of troubleshooting that TRL, vLLM, llm-compressor, torch and Triton write."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# Python --------------------------------------------------------------------------------------------------------------


def double(trainer: type) -> type:
    """A trainer that takes what the real one takes, does what it is told, and trains nothing."""

    class Double:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            arguments = inspect.signature(trainer.__init__).bind(self, *args, **kwargs).arguments
            further = inspect.signature(GRPOTrainer.__init__).bind(self, "model", **arguments["kwargs"]).arguments
            assert isinstance(arguments["args"], trainer._config_class)
            assert callable(arguments["reward_funcs"]) and "prompt" in further["train_dataset"].column_names

        def __getattr__(self, name: str) -> Any:
            method = getattr(trainer, name)
            return lambda *args, **kwargs: inspect.signature(method).bind(self, *args, **kwargs)

    return Double


def changed(block: Block) -> Block:
    """A diff's new side."""
    lines = [line[1:] for line in block.code.splitlines() if not line.startswith("-")]
    return block._replace(code="\n".join(lines))


PYTHON = [*all_blocks("python"), *map(changed, all_blocks("diff"))]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_run(block, monkeypatch):
    dataset = datasets.Dataset.from_list([{"prompt": "1 + 1?", "question": "1 + 1?", "answer": "2"}] * 2)
    for trainer in TRAINERS:
        monkeypatch.setattr(trl_qurl, trainer.__name__, double(trainer))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: dataset)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.chdir(ROOT)
    names = {"reward": lambda completions, **kwargs: [0.0] * len(completions), "dataset": dataset}
    exec(compile(block.code, str(block), "exec"), names)
    for expression, shown in re.findall(r"^print\((.*?)\) +# (True|False|\[\[[^\n]*?\]\])", block.code, re.MULTILINE):
        found, expected = torch.as_tensor(eval(expression, names)), torch.tensor(ast.literal_eval(shown))
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=0, check_dtype=False)


def test_the_script_of_from_trl_names_what_a_cpu_needs(monkeypatch):
    """Without the environment of the other blocks, which stands for a machine that has a GPU."""
    [block] = [block for block in blocks(DOCS / "from-trl.md", "python") if "trainer.train()" in block.code]
    code = re.sub(r"# (use_cpu=True,).*", r"\1", block.code)
    assert code != block.code
    dataset = datasets.Dataset.from_list([{"prompt": "1 + 1?", "question": "1 + 1?", "answer": "2"}] * 2)
    monkeypatch.setattr(trl_qurl, "QuRLGRPOTrainer", double(trl_qurl.QuRLGRPOTrainer))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: dataset)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    exec(compile(code, str(block), "exec"), {})


# Names and figures ---------------------------------------------------------------------------------------------------


def resolve(dotted: str) -> Any:
    """What `trl_qurl.a.b` is: a module, or something in one."""
    if importlib.util.find_spec(dotted.split(".")[0]) is None:
        raise ImportError(dotted)
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ImportError(dotted)


@pages
def test_names_and_files_in_the_text_exist(page):
    for code in inline_code(page):
        if re.fullmatch(r"trl_qurl(\.\w+)+", code) and not code.endswith((".py", ".server", ".jsonl")):
            resolve(code)
        if re.fullmatch(r"(benchmarks|docs|examples|requirements|tests|tools|trl_qurl)/[\w./*-]+", code):
            assert list(ROOT.glob(code.rstrip("/"))), f"{page.name} speaks of {code}"
        if re.fullmatch(r"\w+\.(py|yaml)", code) and code not in NO_FILES:
            places = ("trl_qurl", "examples", "benchmarks", "tests", "tools")
            assert any(list((ROOT / place).rglob(code)) for place in places), f"{page.name} speaks of {code}"


def files_in_tree(tree: str) -> set[str]:
    """The files of a drawing in which each line is a name, indented by two spaces per level, and what it is."""
    folders: list[str] = []
    files = set()
    for line in tree.splitlines():
        level = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[level:] = [name]
        if not name.endswith("/"):
            files.add("".join(folders))
    return files


def test_the_architecture_names_every_file_of_the_core():
    [tree] = blocks(DOCS / "architecture.md", "")
    core = {path for path in SOURCES if "lab" not in path.relative_to(ROOT / "trl_qurl").parts}
    packages = {path for path in core if path.name == "__init__.py" and path.parent != ROOT / "trl_qurl"}
    assert files_in_tree(tree.code) == {path.relative_to(ROOT).as_posix() for path in core - packages}


CONFIGS = {
    "Quantized rollouts": ("settings.md", QuRLGRPOConfig, GRPOConfig),
    "PPO": ("algorithms.md", QuRLPPOConfig, QuRLGRPOConfig),
    "RLOO": ("algorithms.md", QuRLRLOOConfig, QuRLGRPOConfig),
}
"""By section: its page, the configuration that it describes, and the one that it builds on."""


def default_values(config: type) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config)
    }


@pytest.mark.parametrize("section", CONFIGS)
def test_settings_are_all_there_with_their_defaults(section):
    page, config, parent = CONFIGS[section]
    defaults, inherited = default_values(config), default_values(parent)
    shown = {}
    for row in rows(DOCS / page, section):
        names, values = (re.findall(r"`([^`]+)`", cell) for cell in row[:2])
        if names and set(names) <= defaults.keys() and len(names) == len(values):
            shown |= {field: ast.literal_eval(value) for field, value in zip(names, values, strict=True)}
    assert shown == {field: defaults[field] for field in shown}
    own = {field for field in defaults if field not in inherited or defaults[field] != inherited[field]}
    assert own <= shown.keys()


METRIC = re.compile(
    r"(?:acr|advantages|critic|dynamic_sampling|mismatch|policy|sync|throughput|time|weights)/[a-z0-9_]+"
)


def test_metrics_are_all_explained():
    logged = {name for path in SOURCES for name in re.findall(rf'"({METRIC.pattern})"', path.read_text())}
    explained = {name for code in inline_code(DOCS / "metrics.md") for name in METRIC.findall(code)}
    assert len(logged) > 25
    assert explained == logged


def test_the_figures_of_the_example_runs_are_those_of_their_logs():
    pytest.importorskip("matplotlib", reason="needs matplotlib (trl-qurl[report])")
    spec = importlib.util.spec_from_file_location("metrics_pictures", ROOT / "tools" / "metrics_pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    names = {"accuracy of the policy, exact": "expected_accuracy"}
    table = {
        names.get(row[0], row[0].strip("`")): row[1:]
        for row in rows(DOCS / "metrics.md")
        if re.match(r"[\d.]+$", row[1])
    }
    assert table == pictures.figures()


def messages() -> list[str]:
    """Every text of the package and the Makefile, with an ellipsis for what is filled in."""
    texts = [(ROOT / "Makefile").read_text()]
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%\S*[sdf]", "…", node.value))
    return texts


def test_messages_people_meet_are_ours():
    texts, looked_up = messages(), 0
    for row in rows(DOCS / "troubleshooting.md"):
        for message in re.findall(r"`([^`]{12,}[^`]*)`", row[0]):
            if " " not in message or message in OTHERS or message.startswith("accelerate"):
                continue
            parts = [part for part in message.split("…") if part.strip()]
            assert any(all(part in text for part in parts) for text in texts), message
            looked_up += 1
    assert looked_up > 25


def test_the_readme_is_short_and_provenance_is_in_benchmarks():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    for page in (ROOT / "README.md", *SITE):
        assert not re.search(r"\bcommit [0-9a-f]{7}\b", page.read_text()), page.name


# Links ---------------------------------------------------------------------------------------------------------------


@pages
def test_links_lead_somewhere(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), f"{link} in {page.name}"
        if anchor:
            assert place.suffix == ".md" and anchor in anchors(place), f"{link} in {page.name}"


def test_every_page_is_linked_from_the_readme_or_the_start():
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES[:1] + SITE for link in links(page)}
    assert set(SITE) <= linked


@pages
def test_a_page_has_one_title_and_no_level_left_out(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below <= above + 1 for above, below in pairwise(levels))
