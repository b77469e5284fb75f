"""Public functions and fields say what they are. Ruff looks for docstrings and for arguments that
are missing in a list of them.
"""

import re

import pytest
from documents import ROOT

griffe = pytest.importorskip("griffe", reason="needs griffe (trl-qurl[docs])")
pytest.importorskip("mkdocs", reason="needs mkdocs (trl-qurl[docs])")

CALLED_BY_THE_TRAINER = ("compute_loss", "training_step", "create_scheduler", "save_model")
"""Methods that extend one of transformers', under its own documentation."""
TOLD_IN_PROSE = ("trl_qurl.trainers.engine.", "trl_qurl.lab.grading.")


@pytest.fixture
def functions(script):
    """All functions in the reference, and the methods of classes there."""
    hook = script("tools", "docs_public_names")
    package = griffe.load("trl_qurl", search_paths=[ROOT], resolve_aliases=True)
    things = []
    _, _, shown = (ROOT / "docs" / "reference.md").read_text().partition(hook.MARK)
    for path in hook.SHOWN.findall(shown):
        for _, thing in hook.named(package, path):
            things.append(thing)
            if thing.is_class:
                things += thing.members.values()
    skipped = ("_", "on_", *CALLED_BY_THE_TRAINER)
    described = []
    for each in things:
        is_skipped = each.name.startswith(skipped) or each.path.startswith(TOLD_IN_PROSE)
        if each.is_function and not is_skipped:
            described.append(each)
    return described


def test_arguments_results_and_errors_of_public_functions_are_described(functions):
    assert len(functions) > 30
    for function in functions:
        sections = function.docstring.parse("google", warnings=False)
        kinds = {section.kind.value for section in sections}
        taken = [each for each in function.parameters if not re.match(r"_|self|cls", each.name)]
        if taken:
            assert "parameters" in kinds, f"{function.path}: its arguments"
        if function.returns and str(function.returns) != "None":
            assert kinds & {"returns", "yields"}, f"{function.path}: its result"
        if re.search(r"^\s+raise \w", function.source, re.MULTILINE):
            assert "raises" in kinds, f"{function.path}: its errors"
