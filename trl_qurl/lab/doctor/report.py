"""The report as text for a terminal, and as JSON for an issue."""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import asdict
from typing import Any

from trl_qurl import __version__
from trl_qurl.lab.doctor.lines import Line, Status
from trl_qurl.lab.doctor.privacy import without_private

WIDEST = 118
NAME_WIDTH = 14


def as_text(line: Line) -> str:
    """A line with its status, name, sentence and advice, wrapped to the terminal."""
    status = "FAILED" if line.status is Status.FAILED else line.status.value
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    start = f"{status:<8}{line.name:<{NAME_WIDTH}}"
    indent = " " * len(start)
    options = {"width": width, "subsequent_indent": indent, "break_on_hyphens": False, "break_long_words": False}
    wrapped = textwrap.wrap(start + without_private(line.text), **options)  # type: ignore[arg-type]
    if line.advice:
        # An arrow of its own, because this is what the reader is to do.
        options["subsequent_indent"] = f"{indent}   "
        wrapped += textwrap.wrap(f"{indent}-> {without_private(line.advice)}", **options)  # type: ignore[arg-type]
    return "\n".join(wrapped)


def skipped_as_text(lines: list[Line]) -> list[str]:
    """Lines that were not tried, those with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for line in lines:
        if line.status is Status.SKIPPED:
            by_reason.setdefault(line.text, []).append(line.name)
    return [
        as_text(Line(names[0], Status.SKIPPED, f"{reason}; also {', '.join(names[1:])}" if names[1:] else reason))
        for reason, names in by_reason.items()
    ]


def summary(lines: list[Line], seconds: float) -> str:
    """The last line: whether everything that is needed works."""
    faults = [line.name for line in lines if line.status is Status.FAILED]
    tried = sum(line.status is not Status.SKIPPED for line in lines)
    took = f"{tried} {'check' if tried == 1 else 'checks'}, {seconds:.0f} s"
    if faults:
        return f"FAILED: {', '.join(faults)} ({took})."
    return f"Everything that was tried works ({took})."


def as_json(lines: list[Line], seconds: float) -> str:
    """All lines with their figures, for a bug report."""
    content = {
        "trl_qurl": __version__,
        "seconds": round(seconds, 1),
        "works": all(line.status is not Status.FAILED for line in lines),
        "lines": [asdict(line) for line in lines],
    }
    return json.dumps(_clean(content), indent=2)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return without_private(value)
    if isinstance(value, dict):
        return {name: _clean(part) for name, part in value.items()}
    return [_clean(part) for part in value] if isinstance(value, list | tuple) else value
