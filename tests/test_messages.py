"""Every error that a user can meet says what to do, or has a row in docs/troubleshooting.md.

A message names its remedy if a clause of it begins with a verb of `VERBS`, as an order, or if it
says what a value must be. What is known at run time only is `…`, in messages as in rows.
"""

import ast
import re

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
    "A step has no finite loss": "doctor adds the advice for a failed trial",
    "A reward function failed in …, line …": "the user's own line, and the error in it",
    "a step is not a whole number": "becomes the message that a run log is damaged",
    "… cannot work: …. ….": "ends with what is to be done",
    "The task … is not of the form name=source: ….": "the same",
    "Unknown task …: ….": "the same",
    "The list of tasks is empty: ….": "the same",
    "The longest prompt (… tokens) and --max-tokens …": "the same",
    "… holds an adapter, and no model: ….": "the same",
    "… has no trainable parameter": "the same",
    "…: the one that was trained with reads other weights": "the same",
    "… has the pattern …, which matches": "the same",
    "… answered … with HTTP …": "the same",
    "… did not answer …": "the same",
    "… GB are free and … GB are needed": "becomes the message that names rollout_checkpoint_dir",
    "… belongs to another user": "the same",
    "… Before that: …": "joins two messages",
    "No adapter is loaded": "a server was restarted, and the request is repeated",
    "The server was restarted": "the same",
    "The server's workers stopped receiving": "the same",
}
"""Beginnings of messages that need no remedy, and why."""


def text_of(node):
    """The text of an expression in the source."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(map(text_of, node.values))
        case ast.BinOp():
            return text_of(node.left) + text_of(node.right)
    return "…"


def messages():
    """Yield the place and the text of each message of the package."""
    for path in sorted((ROOT / "trl_qurl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and ERROR.fullmatch(ast.unparse(node.func)):
                text = text_of(node.args[0])
                if text.strip("… "):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def listed():
    """Yield the messages in docs/troubleshooting.md."""
    for section in SECTIONS:
        for cells in rows(ROOT / "docs" / "troubleshooting.md", section):
            for code in re.findall(r"`([^`]+)`", cells[0]):
                yield re.compile(re.escape(code.strip("… ")).replace("…", ".*"))


MESSAGES = dict(messages())
LISTED = [*listed()]


@pytest.mark.parametrize("place", MESSAGES)
def test_a_message_says_what_to_do(place):
    text = MESSAGES[place]
    says_it = REMEDY.search(text) or text.startswith(tuple(NEITHER))
    assert says_it or any(pattern.search(text) for pattern in LISTED), (
        f"{text!r} says what is wrong, and not what to do: add that, or a row to troubleshooting.md"
    )
