"""Everything private that trl_qurl relies on in TRL, vLLM, transformers, accelerate, torch and
llm-compressor.

Most of it is data, the tables of `trl_qurl.lab.contract`. Two tests compare them with the package: a
private name that is not listed fails, and so does an import that a library no longer has. Sources
are read, not imported, so this file needs no engine and is the first to run after an upgrade
(`pytest tests/test_trl_contract.py`).
"""

import ast
import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

import trl_qurl
from trl_qurl.config.checks.engine_arguments import TAKEN_ENGINE_ARGUMENTS
from trl_qurl.config.checks.sampling import HARMLESS, NEUTRAL, REFUSED
from trl_qurl.lab import contract
from trl_qurl.lab.contract import (
    LIBRARIES,
    definition,
    read_tables,
    source_file,
    text_of,
)
from trl_qurl.lab.doctor import environment
from trl_qurl.lab.doctor.environment import check_private_parts
from trl_qurl.lab.doctor.report import Status
from trl_qurl.rollout.samples import sampling_arguments

GENERATION = "trl.generation.vllm_generation"
CLIENT = "trl.generation.vllm_client"
EXTENDED = (
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
    "trl.trainer.base_trainer",
    GENERATION,
    CLIENT,
    "transformers.trainer",
)
"""Modules with classes that we extend."""

OTHER_TRAINERS = [
    "trl.trainer.distillation_trainer",
    *(f"trl.experimental.{name}.{name}_trainer" for name in ("sdpo", "sdft", "gold", "iw_opd")),
]
"""Where docs/architecture.md says that `QuantizedEngineMixin` works."""

NOT_PRIVATE = {
    "_asdict",  # of a named tuple
    "_fields",  # of a named tuple
    "_replace",  # of a named tuple
    "_exit",  # of `os`
    "_version",  # how often a tensor was written to, documented by torch
    "_evaluate",  # of our callback; a trainer has one too
}


# Reading sources
# --------------------------------------------------------------------------------------------------


def calls(node, function):
    found = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    return [call for call in found if ast.unparse(call.func) == function]


# The tables
# --------------------------------------------------------------------------------------------------


ROWS = read_tables()


@pytest.mark.parametrize(
    "row", ROWS, ids=[f"{row.table}-{row.name or row.module}"[:90] for row in ROWS]
)
def test_what_we_rely_on_is_there(row):
    if importlib.util.find_spec(row.module.partition(".")[0]) is None:
        pytest.skip("not installed")
    assert row.difference() is None


RETURNED = "return prompt_ids, completion_ids, logprobs, logprob_token_ids"
RETURNS = r"VLLMGeneration.generate returns .*logprob_token_ids, masks\).*backend.py"


@pytest.mark.parametrize(
    ("module", "before", "after", "named"),
    [
        (GENERATION, RETURNED, f"{RETURNED}, masks", RETURNS),
        (GENERATION, "num_generations: int", "count: int", "no longer takes num_generations"),
        (CLIENT, "def _post(", "def _send(", "VLLMClient._post is gone"),
    ],
)
def test_a_change_of_trl_is_named(module, before, after, named, tmp_path, monkeypatch):
    text = source_file(module).read_text()
    assert before in text
    changed = tmp_path / "changed.py"
    changed.write_text(text.replace(before, after))
    monkeypatch.setattr(
        contract, "source_file", lambda name: changed if name == module else source_file(name)
    )
    for cached in (contract.tree, contract.text_of):
        monkeypatch.setattr(contract, cached.__name__, functools.cache(cached.__wrapped__))
    found = "\n".join(contract.differences("trl"))
    assert re.search(named, found), found


def test_doctor_says_in_what_a_library_differs(monkeypatch):
    assert check_private_parts().status is Status.OK
    monkeypatch.setattr(environment, "differences", lambda library: [f"{library} is new"])
    line = check_private_parts()
    assert line.status is Status.NOTE
    assert "trl is new; vllm is new" in line.text


# Compared with the package
# -------------------------------------------------------------------------------------------


@functools.cache
def code():
    """Every node of the package's code."""
    nodes = []
    for path in Path(trl_qurl.__file__).parent.rglob("*.py"):
        nodes += ast.walk(ast.parse(path.read_text()))
    return nodes


def test_every_private_name_is_listed():
    """A name is private to a library if it is not ours, or if the classes that we extend have it
    too.
    """
    ours = set()
    used = set()
    for node in code():
        if isinstance(node, ast.FunctionDef):
            ours.add(node.name)
            used.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            ours.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            ours.update(map(ast.unparse, node.targets))
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
            if isinstance(node.ctx, ast.Store):
                ours.add(node.attr)
    extended = "".join(text_of(module, "") for module in EXTENDED)
    theirs = set(re.findall(r"(?:\bdef |\bself\.)(_\w+)", extended))
    texts = [Path(__file__).read_text()]
    for path in Path(contract.__file__).parent.glob("*.txt"):
        texts.append(path.read_text())
    listed = set(re.findall(r"\w+", "".join(texts)))
    private = {name for name in used if re.match("_(?!_)", name)} - NOT_PRIVATE - listed
    assert private & theirs == private - ours == set(), (
        "these are private to a library: list them in trl_qurl/lab/contract"
    )


def imported_names():
    """(module, name) of every import from inside a library; `tools/cuda_contract.py` compares them
    in two builds.
    """
    names = set()
    for node in code():
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if "." in module and node.level == 0 and module.split(".")[0] in LIBRARIES:
            names |= {(module, alias.name) for alias in node.names}
    return names


def test_every_import_from_inside_a_library_exists():
    inside = imported_names()
    assert len(inside) > 50
    for module, name in sorted(inside):
        if importlib.util.find_spec(module.split(".")[0]) is None:
            continue  # llm-compressor is optional
        path = source_file(module)
        assert path is not None, module
        # a package passes on what its modules define
        files = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
        text = "".join(file.read_text() for file in files)
        is_there = source_file(f"{module}.{name}") or re.search(rf"\b{name}\b", text)
        assert is_there, f"{name} is gone from {module}"


def test_vllms_variables_exist():
    texts = [str(node.value) for node in code() if isinstance(node, ast.Constant)]
    ours = {text for text in texts if re.fullmatch(r"VLLM_[A-Z0-9_]+", text)}
    assert len(ours) > 5
    missing = ours - set(re.findall(r"\bVLLM_\w+", source_file("vllm.envs").read_text()))
    assert not missing, f"vLLM no longer reads {sorted(missing)}, which trl_qurl sets or reads."


def test_engine_arguments_are_those_the_config_reserves():
    [call] = calls(definition(GENERATION, "VLLMGeneration._init_vllm"), "LLM")
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert not call.args and None not in given, "see build_engine"
    ours = {"quantization_config", "worker_extension_cls", "enable_lora", "max_lora_rank"}
    assert given.keys() == TAKEN_ENGINE_ARGUMENTS.keys() - ours | {"seed"}
    expected = {
        "max_num_batched_tokens": "4096",  # as the docstring of the config says
        # as our backend numbers engines
        "seed": "accelerator.process_index // self.tensor_parallel_size",
        "logprobs_mode": "'processed_logprobs'",  # the importance ratio needs these
        "model": "model.name_or_path",  # `_make_route` asks whether it is empty
    }
    assert expected.items() <= given.items()


@pytest.mark.parametrize("module", OTHER_TRAINERS)
def test_trainers_of_the_table_have_what_the_engine_needs(module):
    [trainer] = re.findall(r"^class (\w+Trainer)\(", source_file(module).read_text(), re.M)
    body = text_of(module, trainer)
    for extended in (
        "self.vllm_generation = VLLMGeneration(",
        "self._metrics = {'train': defaultdict(list), 'eval': defaultdict(list)}",
        "def _prepare_inputs(self, generation_batch",
        "def compute_loss(self, model, inputs",
    ):
        assert extended in body, trainer
    is_inside = "from ...generation.vllm_generation import VLLMGeneration" in body
    assert is_inside == (trainer in ("SDPOTrainer", "SDFTTrainer"))


def test_sampling_parameters_that_the_config_names_exist():
    body = definition("vllm.sampling_params", "SamplingParams").body
    fields = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    named = {
        *HARMLESS,
        *NEUTRAL,
        *REFUSED,
        *sampling_arguments({}),
        "min_p",
        "temperature",
        "structured_outputs",
    }
    assert named <= fields, "see config/checks/sampling.py"


def test_a_deleted_engine_does_all_of_vllms_shutdown_but_for_the_process_groups():
    vllms = definition("vllm.v1.engine.core", "EngineCore.shutdown")
    # in the sources, because on a CPU nothing tells whether a worker was shut down
    names = {ast.unparse(node.func) for node in ast.walk(vllms) if isinstance(node, ast.Call)}
    left_out = {"cleanup_dist_env_and_memory", *(name for name in names if "logger" in name)}
    ours = definition("trl_qurl.rollout.repairs.finalizer", "_release")
    for name in names - left_out:
        assert calls(ours, re.sub(r"^self\b", "core", name)), name
