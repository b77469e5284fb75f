"""Every public name says what it is: arguments, results, fields and errors."""

import re
from functools import cache

import pytest
from documents import ROOT
from public_names import public_names

griffe = pytest.importorskip("griffe", reason="needs griffe (trl-qurl[docs])")

CALLED_BY_THE_TRAINER = {"compute_loss", "training_step", "create_scheduler", "save_model"}
"""Methods that extend one of transformers', under its own documentation."""


@cache
def package() -> "griffe.Module":
    return griffe.load("trl_qurl", search_paths=[ROOT], resolve_aliases=True)


def public_things() -> list["griffe.Object"]:
    """Each once, wherever it is exported from."""
    found = {}
    for module, name in public_names():
        thing = package()[f"{module}.{name}".removeprefix("trl_qurl.")]
        thing = thing.final_target if thing.is_alias else thing
        found[thing.path] = thing
    return list(found.values())


def functions() -> list["griffe.Function"]:
    """Public functions, and public methods of public classes as far as they are written here."""
    things = public_things()
    methods = [
        member
        for thing in things
        if thing.is_class
        for name, member in thing.members.items()
        if member.is_function
        and not name.startswith(("_", "on_"))
        and name not in CALLED_BY_THE_TRAINER
    ]
    return [thing for thing in things if thing.is_function] + methods


def sections(thing: "griffe.Object") -> dict[str, "griffe.DocstringSection"]:
    return {
        section.kind.value: section for section in thing.docstring.parse("google", warnings=False)
    }


def test_every_public_name_has_a_docstring():
    assert len(public_things()) > 50
    assert [thing.path for thing in public_things() if not thing.has_docstring] == []


def test_every_argument_of_a_public_function_is_described():
    missing = []
    for function in functions():
        section = sections(function).get("parameters")
        described = (
            {parameter.name.lstrip("*") for parameter in section.value} if section else set()
        )
        for parameter in function.parameters:
            name = parameter.name.lstrip("*")
            if name not in described | {"self", "cls"} and not name.startswith("_"):
                missing.append(f"{function.path}({name})")
    assert missing == []


def test_every_result_and_every_error_of_a_public_function_is_described():
    missing = []
    for function in functions():
        described = sections(function)
        if (
            function.returns
            and str(function.returns) != "None"
            and not {"returns", "yields"} & set(described)
        ):
            missing.append(f"{function.path} -> {function.returns}")
        if re.search(r"^\s+raise \w", function.source, re.MULTILINE) and "raises" not in described:
            missing.append(f"{function.path} raises")
    assert missing == []


def line_above(thing, member):
    """Return the line above a member of a class."""
    return thing.source.splitlines()[member.lineno - thing.lineno - 1].strip()


def test_every_field_of_a_public_class_is_described():
    missing = []
    for thing in public_things():
        if not thing.is_class or thing.name.endswith("Trainer"):
            continue
        for name, member in thing.members.items():
            is_field = (
                member.is_attribute
                and member.annotation
                and not name.startswith("_")
                and not member.docstring
            )
            # Configurations describe theirs in groups, in the manner of transformers; small classes
            # by comments.
            is_described = is_field and (
                re.search(rf"^ *{name}(:| \()", thing.docstring.value, re.MULTILINE)
                or re.search(r"  # [\w`]", member.source)
                or line_above(thing, member).startswith("# ")
            )
            if is_field and not is_described:
                missing.append(f"{thing.path}.{name}")
    assert missing == []
