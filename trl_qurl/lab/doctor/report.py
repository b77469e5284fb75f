"""The report: one line per check, as text for a terminal and as JSON for an issue."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import shutil
import sys
import textwrap
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from trl_qurl import __version__

WIDEST = 118
NAME_WIDTH = 16

SECRET = re.compile(r"AUTH|CREDENTIAL|KEY|PASS|SECRET|TOKEN(?!IZERS)", re.IGNORECASE)
"""In the names of variables with secrets."""
SHORTEST = 4
"""Minimum length of a private text to replace; shorter ones often are ordinary words."""


class Status(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    NOTE = "note"  # works, but there is something to know or to improve
    FAILED = "FAILED"  # something required does not work
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Line:
    """Result of one check."""

    name: str
    text: str
    status: Status = Status.OK
    advice: str = ""  # how to fix or improve it
    data: dict[str, Any] = field(default_factory=dict)  # more values for --json


def as_text(line: Line) -> str:
    """Format a line with its status, name, text and advice, wrapped to the terminal."""
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    start = f"{line.status:<8}{line.name:<{NAME_WIDTH}}"
    indent = " " * len(start)
    wrapper = textwrap.TextWrapper(
        width, start, indent, break_on_hyphens=False, break_long_words=False
    )
    wrapped = wrapper.wrap(line.text)
    if line.advice:
        # An arrow on a new line, because the reader has to act on it.
        wrapper.initial_indent = f"{indent}-> "
        wrapper.subsequent_indent = f"{indent}   "
        wrapped += wrapper.wrap(line.advice)
    return "\n".join(wrapped)


def as_json(lines: list[Line]) -> str:
    """Format all lines with their data for a public post.

    Secrets, home directories, user and host names are replaced.
    """
    works = all(line.status is not Status.FAILED for line in lines)
    content = {"trl_qurl": __version__, "works": works, "lines": [asdict(line) for line in lines]}
    return json.dumps(_redact(content), indent=2)


def _redact(value: object) -> object:
    if isinstance(value, str):
        return _without_private(value)
    if isinstance(value, dict):
        return {name: _redact(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_redact(part) for part in value]
    return value


def _without_private(text: str) -> str:
    """Replace the private parts of a text with placeholders."""
    placeholders = {value: f"<{name}>" for name, value in os.environ.items() if SECRET.search(name)}
    placeholders |= {sys.prefix: "<environment>", str(Path.home()): "~", platform.node(): "<host>"}
    with suppress(KeyError, OSError):  # a user without a name, as in some containers
        placeholders[f"/{getpass.getuser()}/"] = "/<user>/"
    for value, placeholder in placeholders.items():
        if len(value) >= SHORTEST:
            text = text.replace(value, placeholder)
    return text
