"""Hook of mkdocs: a table of every name in the reference, with the first line of its docstring.

The table lists what docs/reference.md shows below it with `::: name` lines;
tests/test_documentation.py compares it with the code.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- Here the site has a table of every name. -->"
SHOWN = re.compile(r"^::: (?P<path>[\w.]+)$", re.MULTILINE)
REFERENCE = re.compile(r"\[`~?(?P<path>[\w.]+)`\]")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the table."""
    if MARK not in markdown:
        return markdown
    above, _, below = markdown.partition(MARK)
    return above + table(below) + below


def table(markdown: str) -> str:
    """All names that a text shows, in their order."""
    package = griffe.load("trl_qurl", search_paths=[ROOT], resolve_aliases=True)
    lines = ["| name | description |", "|---|---|"]
    for shown in SHOWN.finditer(markdown):
        for path, thing in named(package, shown["path"]):
            lines.append(f"| [`{path}`](#{path}) | {first_line(thing)} |")
    return "\n".join(lines)


def named(package: griffe.Module, path: str) -> Iterator[tuple[str, griffe.Object]]:
    """The object itself, or, for a module, everything it defines."""
    thing = package[path.removeprefix("trl_qurl.")]
    if thing.is_alias:
        thing = thing.final_target
    if not thing.is_module:
        yield path, thing
        return
    for name, member in thing.members.items():
        is_from_elsewhere = member.is_alias or member.is_module
        if not is_from_elsewhere and not name.startswith("_") and member.has_docstring:
            yield f"{path}.{name}", member


def first_line(thing: griffe.Object) -> str:
    """The first sentence of a docstring, as a cell of a table."""
    paragraph = " ".join(thing.docstring.value.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z0-9`)])\.(?: |$)|(?<=\w): (?=the)", paragraph)[0].rstrip(":.")
    return REFERENCE.sub(r"`\g<path>`", sentence).replace("|", "\\|")
