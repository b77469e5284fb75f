"""Compare the documentation with the code: Python blocks, names, fields, metrics, links, claims.

Commands are in tests/test_documented_commands.py. `make docs` builds the site, where any warning is
an error, and ruff looks for docstrings and their arguments.

Every Python block runs. Blocks that train a model of the Hub run with doubles: the configuration is
real, a trainer checks its arguments and method calls against the real signatures and trains
nothing, and data sets have two rows.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from unittest.mock import DEFAULT, create_autospec

import datasets
import pytest
import torch
from documents import PAGES, ROOT, SITE, all_blocks, anchors, blocks, inline_code, links, new_side

import trl_qurl
from trl_qurl import QuRLGRPOTrainer, QuRLPPOTrainer, QuRLRLOOTrainer

DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "trl_qurl").rglob("*.py"))
FOLDERS = "trl_qurl|examples|benchmarks|tests|tools"
TRAINERS = (QuRLGRPOTrainer, QuRLPPOTrainer, QuRLRLOOTrainer)
WITHOUT_ALL = [
    "trl_qurl.advantages",
    "trl_qurl.lab.data",
    "trl_qurl.lab.evaluation.scores",
    "trl_qurl.lab.runs",
    "trl_qurl.objective",
    "trl_qurl.quantization.uaq",
    "trl_qurl.rollout.errors",
    "trl_qurl.rollout.mismatch",
    "trl_qurl.trainers.callbacks",
    "trl_qurl.trainers.run_log",
]
"""Public modules without `__all__`: all functions and classes without an underscore are public."""

NO_FILES = r"(first_run|my_rewards|utils|helpers)\.py|(settings|mismatch|other)\.yaml"
"""Files that the text makes up or forbids."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# Python
# --------------------------------------------------------------------------------------------------


def check_of(trainer):
    """What a double of a trainer does with its arguments."""

    def check(*args, **kwargs):
        given = inspect.signature(trainer).bind(*args, **kwargs).arguments
        assert isinstance(given["args"], trainer._config_class)
        assert callable(given["reward_funcs"])
        assert "prompt" in given["train_dataset"].column_names
        return DEFAULT

    return check


# test_examples.py trains it
PYTHON = [block for block in all_blocks("python") if block.page.name != "tutorial.md"]
PYTHON += map(new_side, all_blocks("diff"))


@pytest.fixture
def names(monkeypatch):
    """The names that a block may use without defining them; trainers and data sets are doubles."""
    row = {"prompt": "1 + 1?", "question": "1 + 1?", "answer": "#### 2"}
    dataset = datasets.Dataset.from_list([row] * 2)
    for trainer in TRAINERS:
        double = create_autospec(trainer, side_effect=check_of(trainer))
        monkeypatch.setattr(trl_qurl, trainer.__name__, double)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: dataset)
    monkeypatch.chdir(ROOT)
    return {"reward": lambda completions, **kwargs: [0.0] * len(completions), "dataset": dataset}


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_run(block, names, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    exec(compile(block.code, str(block), "exec"), names)
    printed = r"^print\((.*?)\) +# (True|False|\[\[[^\n]*?\]\])"
    for expression, shown in re.findall(printed, block.code, re.MULTILINE):
        actual = torch.as_tensor(eval(expression, names))
        expected = torch.tensor(ast.literal_eval(shown))
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=0, check_dtype=False)


# Names and figures
# --------------------------------------------------------------------------------------------------


@pages
def test_names_and_files_in_the_text_exist(page):
    for code in inline_code(page):
        is_name = re.fullmatch(r"trl_qurl(\.\w+)+(?<!\.py)(?<!\.server)(?<!\.jsonl)", code)
        if is_name:
            pkgutil.resolve_name(code)
        if re.fullmatch(rf"({FOLDERS}|docs|requirements)/[\w./*-]+", code):
            assert list(ROOT.glob(code.rstrip("/"))), code
        if re.fullmatch(r"\w+\.(py|yaml)", code) and not re.fullmatch(NO_FILES, code):
            found = []
            for folder in FOLDERS.split("|"):
                found += (ROOT / folder).rglob(code)
            assert found, code


def test_the_architecture_names_every_file_of_the_core():
    """Read a tree: each line has a name, indented by two spaces per level, and a description."""
    [tree] = blocks(DOCS / "architecture.md", "")
    path = []
    named = set()
    for indent, name in re.findall(r"^( *)(\S+)", tree.code, re.MULTILINE):
        path[len(indent) // 2 :] = [name]
        named.add("".join(path))
    files = {file.relative_to(ROOT).as_posix() for file in SOURCES}
    core = {file for file in files if not re.match(r"trl_qurl/(lab/|.+/__init__)", file)}
    assert {file for file in named if not file.endswith("/")} == core


def test_tables_of_settings_are_those_of_the_docstrings(script):
    docs_settings = script("tools", "docs_settings")
    tables = []
    for page in SITE:
        text = page.read_text()
        tables += docs_settings.TABLE.findall(text)
        assert docs_settings.with_tables(text) == text, (
            f"{page.name} is out of date: run `python tools/docs_settings.py`"
        )
    assert len(tables) == 3


def test_metrics_are_all_explained():
    metric = r"((?:acr|advantages|critic|dynamic_sampling|mismatch|policy|sync|throughput|time|weights)/[a-z0-9_]+)"
    code = "".join(path.read_text() for path in SOURCES)
    explained = " ".join(inline_code(DOCS / "metrics.md"))
    logged = set(re.findall(f'"{metric}"', code))
    assert len(logged) > 25
    assert set(re.findall(metric, explained)) == logged


def is_own(it, name, module):
    """Whether a module defines a public function or class."""
    is_code = inspect.isclass(it) or inspect.isfunction(it)
    return is_code and it.__module__ == module and not name.startswith("_")


def test_every_public_name_is_in_the_reference(script):
    pytest.importorskip("mkdocs", reason="needs mkdocs (trl-qurl[docs])")
    hook = script("tools", "docs_public_names")
    _, _, listed_modules = (DOCS / "reference.md").read_text().partition(hook.MARK)
    table = hook.table(listed_modules)
    names = re.findall(r"^\| \[`(.+?)`", table, re.MULTILINE)
    listed = {id(pkgutil.resolve_name(name)) for name in names}
    missing = []
    for path in SOURCES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name not in WITHOUT_ALL and "\n__all__ = " not in path.read_text():
            continue
        module = importlib.import_module(name)
        own = [each for each, it in vars(module).items() if is_own(it, each, name)]
        for each in getattr(module, "__all__", own):
            if id(getattr(module, each)) not in listed:
                missing.append(each)
    assert sorted(missing) == ["__version__", "quiet"], "these are above the table"
    assert dir(trl_qurl) == trl_qurl.__all__, "what a notebook completes"


# Links
# --------------------------------------------------------------------------------------------------


@pages
def test_links_lead_somewhere(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path), link
