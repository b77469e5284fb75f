"""Every error that a user can meet says what to do, or has a row in docs/troubleshooting.md.

A message names its remedy if a clause of it begins with a verb of `VERBS`, as an order, or if it
says what a value must be. What is known at run time only is `…`, in messages as in rows.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from documents import ROOT, rows

VERBS = (
    "add|call|change|check|choose|compare|convert|correct|drop|enlarge|fill|free|give|install|keep|"
    "leave|list|load|lower|make|move|name|narrow|omit|open|pass|raise|remove|rename|resume|restart|"
    "return|run|save|scale|set|shorten|start|stop|train|try|unset|untie|update|use|wait|write"
)
REMEDY = re.compile(
    rf"(?:^|[:;.,(…] ?|\b(?:or|and) )(?:{VERBS})\b|\bmust (?:be|hold)\b|\bsuch as\b",
    re.IGNORECASE,
)
ERROR = re.compile(r"(?!Assertion)\w+Error|ChildFailure")
SECTIONS = (
    "Settings that are refused, and warnings",
    "While the engine starts",
    "During training",
)
"""Sections of docs/troubleshooting.md with messages in the first column."""

NEITHER = {
    "module … has no attribute": "Python's own words",
    "Unknown option or setting (": "names the option that lists them",
    "…() got unexpected keyword arguments": "a line for each, with what replaces it",
    "….__init__() …": "Python's own words, after the name of the class",
    "It ended with status …": "bench says which format was not measured; the log follows",
    "… is not installed.": "a line of doctor's contract, which compares installed packages",
    "… trained … 2 steps": "doctor adds the advice for a failed trial",
    "A step has no finite loss": "the same",
    "A reward function failed in …, line …": "the user's own line, and the error in it",
    "a step is not a whole number": "becomes the message that a run log is damaged",
    "… holds an adapter, and no model: ….": "the caller says what to do (`instead_of_adapter`)",
    "… cannot work: …. ….": "ends with the `way_out` of the conflict",
    "… GB are free and … GB are needed": "becomes the message that names rollout_checkpoint_dir",
    "… belongs to another user": "the same",
    "… Before that: …": "joins two messages",
    "No adapter is loaded": "a server was restarted, and the request is repeated",
    "The server was restarted": "the same",
    "The server's workers stopped receiving": "the same",
}
"""Beginnings of messages that need no remedy, and why."""


class Message(NamedTuple):
    """The text of an error in the source."""

    place: str
    text: str


class Texts:
    """The messages of a module. A name in one stands for every string that the module gives it."""

    def __init__(self, path: Path) -> None:
        self.messages: list[Message] = []
        self._strings: dict[str, list[ast.expr]] = {}
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._strings.setdefault(node.targets[0].id, []).append(node.value)
        for node in nodes:
            if isinstance(node, ast.Call) and node.args and ERROR.fullmatch(ast.unparse(node.func)):
                text = self._text(node.args[0])
                if text.strip("… "):
                    place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
                    self.messages.append(Message(place, text))

    def _text(self, node: ast.expr) -> str:
        match node:
            case ast.Constant():
                return str(node.value)
            case ast.JoinedStr():
                return "".join(map(self._text, node.values))
            case ast.BinOp():
                return self._text(node.left) + self._text(node.right)
            case ast.FormattedValue(value=ast.Name(id=name)):
                strings = [
                    value
                    for value in self._strings.get(name, ())
                    if isinstance(value, ast.Constant | ast.JoinedStr)
                ]
                return "…" + "".join(" " + self._text(value) for value in strings)
        return "…"


def messages() -> Iterator[Message]:
    """Yield the messages of the package."""
    for path in sorted((ROOT / "trl_qurl").rglob("*.py")):
        yield from Texts(path).messages


def listed() -> list[re.Pattern]:
    """Return the messages in docs/troubleshooting.md."""
    patterns = []
    for section in SECTIONS:
        for cells in rows(ROOT / "docs" / "troubleshooting.md", section):
            for code in re.findall(r"`([^`]+)`", cells[0]):
                pieces = map(re.escape, code.strip("… ").split("…"))
                patterns.append(re.compile(".*".join(pieces)))
    return patterns


MESSAGES = list(messages())


@pytest.mark.parametrize("message", MESSAGES, ids=[message.place for message in MESSAGES])
def test_a_message_says_what_to_do(message):
    text = message.text
    has_row = any(pattern.search(text) for pattern in listed())
    needs_neither = any(text.startswith(start) for start in NEITHER)
    assert REMEDY.search(text) or has_row or needs_neither, (
        f"{text!r} says what is wrong, and not what to do: add that, or a row to troubleshooting.md"
    )


def test_exceptions_are_messages_without_a_remedy():
    for start in NEITHER:
        matching = [text for _, text in MESSAGES if text.startswith(start)]
        assert matching and not any(map(REMEDY.search, matching)), start
