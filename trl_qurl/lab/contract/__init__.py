"""Private parts of other libraries that trl-qurl relies on, compared with what is installed.

The tables beside this module list all of them, each with what relies on it:

- `parameters.txt`: functions and methods, with parameters that they take;
- `results.txt`: functions that return a tuple, with the names of its elements;
- `attributes.txt`: classes and functions, with attributes that they have;
- `assigned.txt`: classes and functions, with attributes that they assign to;
- `source.txt`: definitions (`*`: a whole module), with fragments of their source. They must occur
  in this order, and those with `once:` only once.

Sources are read, not imported, so this needs no engine and takes a second.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LIBRARIES = (
    "trl",
    "vllm",
    "transformers",
    "accelerate",
    "peft",
    "compressed_tensors",
    "llmcompressor",
)

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Row(NamedTuple):
    """A row of a table."""

    table: str
    module: str
    name: str  # of a definition, dotted inside classes; empty for the whole module
    parts: list[str]  # what it must have
    user: str  # what relies on it

    def difference(self) -> str | None:
        """Return in what the installed library differs, or `None`."""
        try:
            fault = CHECKS[self.table](self)
        except LookupError as error:
            fault = str(error.args[0])
        return fault and f"{self.module}: {fault} ({self.user})"


def read_tables() -> list[Row]:
    """Return the rows of all tables."""
    rows: list[Row] = []
    for path in sorted(Path(__file__).parent.glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(" "):
                part = line.strip()
                parts = rows[-1].parts
                if path.stem == "source":
                    parts.append(part)
                else:
                    parts += part.split()
            else:
                place, user = line.split(": ", 1)
                module, name = place.split()
                rows.append(Row(path.stem, module, name.removesuffix("*"), [], user))
    return rows


def differences(library: str) -> list[str]:
    """Return a sentence for each row of a library that differs from what is installed."""
    rows = [row for row in read_tables() if row.module.partition(".")[0] == library]
    return [fault for row in rows if (fault := row.difference())]


def source_file(module: str) -> Path | None:
    """Return the source of a module, found without importing its package; `None` if it is gone."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"{package} is not installed.", name=package)
    if not spec.submodule_search_locations:
        return Path(spec.origin or "")  # a module of one file
    path = Path(spec.submodule_search_locations[0], *rest)
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@functools.cache
def tree(module: str) -> ast.Module:
    """Return a module, parsed. Raises `LookupError` if it is gone."""
    path = source_file(module)
    if path is None:
        raise LookupError(f"the module {module} is gone")
    return ast.parse(path.read_text(encoding="utf-8"))


def definition(module: str, name: str) -> ast.AST:
    """Return a class or function, also inside an `if` of the module.

    Raises `LookupError` if it is gone.
    """
    node: ast.AST = tree(module)
    for part in filter(None, name.split(".")):
        nodes = ast.walk(node) if isinstance(node, ast.Module) else vars(node)["body"]
        for child in nodes:
            if isinstance(child, DEFINITIONS) and child.name == part:
                node = child
                break
        else:
            raise LookupError(f"{name} is gone")
    return node


@functools.cache
def text_of(module: str, name: str) -> str:
    """Return the source of a definition in one form: single quotes, one space, no comments."""
    return ast.unparse(definition(module, name))


def _check_parameters(row: Row) -> str | None:
    node = definition(row.module, row.name)
    if not row.parts:
        return None
    given = vars(node)["args"]
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    missing = set(row.parts) - {argument.arg for argument in arguments}
    return f"{row.name} no longer takes {', '.join(sorted(missing))}" if missing else None


def _check_results(row: Row) -> str | None:
    expected = f"({', '.join(row.parts)})"
    returned = [
        ast.unparse(node.value)
        for node in ast.walk(definition(row.module, row.name))
        if isinstance(node, ast.Return) and node.value
    ]
    if expected in returned:
        return None
    return f"{row.name} returns {' or '.join(returned)}, not {expected}"


def _check_attributes(row: Row) -> str | None:
    text = text_of(row.module, row.name)
    missing = [part for part in row.parts if not re.search(rf"\b{part}\b", text)]
    return f"{row.name} no longer has {', '.join(missing)}" if missing else None


def _check_assigned(row: Row) -> str | None:
    assigned = set()
    for node in ast.walk(definition(row.module, row.name)):
        for target in getattr(node, "targets", ()):
            if isinstance(target, ast.Attribute):
                assigned.add(target.attr)
    missing = set(row.parts) - assigned
    return f"{row.name} no longer sets {', '.join(sorted(missing))}" if missing else None


def _check_source(row: Row) -> str | None:
    text = text_of(row.module, row.name)
    name = row.name or row.module
    place = 0
    for part in row.parts:
        fragment = part.removeprefix("once: ")
        if fragment not in text:
            return f"{name} has no `{fragment}` any more"
        if fragment == part:
            first = text.index(fragment)
            if first < place:
                return f"{name} has `{fragment}` in another place"
            place = first
            continue
        end = r"\b" if fragment[-1].isalnum() else ""
        count = len(re.findall(re.escape(fragment) + end, text))
        if count != 1:
            return f"{name} has `{fragment}` {count} times"
    return None


CHECKS: dict[str, Callable[[Row], str | None]] = {
    "parameters": _check_parameters,
    "results": _check_results,
    "attributes": _check_attributes,
    "assigned": _check_assigned,
    "source": _check_source,
}
"""What a row of each table must satisfy; they return what does not."""
