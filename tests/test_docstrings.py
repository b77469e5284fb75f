"""Public functions and fields say what they are. Ruff looks for docstrings and for arguments that
are missing in a list of them.
"""

import re

import pytest
from documents import ROOT
from public_names import public_names

griffe = pytest.importorskip("griffe", reason="needs griffe (trl-qurl[docs])")

CALLED_BY_THE_TRAINER = ("compute_loss", "training_step", "create_scheduler", "save_model")
"""Methods that extend one of transformers', under its own documentation."""


@pytest.fixture(scope="module")
def functions() -> list["griffe.Object"]:
    """Everything public that can be called, and the public methods of classes written here."""
    package = griffe.load("trl_qurl", search_paths=[ROOT], resolve_aliases=True)
    found = {}
    for module, name in public_names():
        thing = package[f"{module}.{name}".removeprefix("trl_qurl.")]
        if thing.is_alias:
            thing = thing.final_target
        found[thing.path] = thing
        if thing.is_class:
            found |= {f"{thing.path}.{member.name}": member for member in thing.members.values()}
    skipped = ("_", "on_", *CALLED_BY_THE_TRAINER)
    return [
        each for each in found.values() if each.is_function and not each.name.startswith(skipped)
    ]


def test_arguments_results_and_errors_of_public_functions_are_described(functions):
    assert len(functions) > 40
    for function in functions:
        sections = function.docstring.parse("google", warnings=False)
        kinds = {section.kind.value for section in sections}
        taken = [each for each in function.parameters if not re.match(r"_|self|cls", each.name)]
        assert not taken or "parameters" in kinds, f"{function.path}: its arguments"
        answers = function.returns and str(function.returns) != "None"
        assert not answers or kinds & {"returns", "yields"}, f"{function.path}: its result"
        raises = re.search(r"^\s+raise \w", function.source, re.MULTILINE)
        assert not raises or "raises" in kinds, f"{function.path}: its errors"
