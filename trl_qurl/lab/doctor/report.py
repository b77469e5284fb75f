"""Format the report as text for a terminal and as JSON for an issue."""

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
    """Format a line with its status, name, sentence and advice, wrapped to the terminal."""
    status = "FAILED" if line.status is Status.FAILED else line.status.value
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    start = f"{status:<8}{line.name:<{NAME_WIDTH}}"
    indent = " " * len(start)
    options = {"width": width, "subsequent_indent": indent, "break_on_hyphens": False, "break_long_words": False}
    wrapped = textwrap.wrap(start + without_private(line.text), **options)  # type: ignore[arg-type]
    if line.advice:
        # Start the advice on a new line with an arrow, because the reader has to act on it.
        options["subsequent_indent"] = f"{indent}   "
        wrapped += textwrap.wrap(f"{indent}-> {without_private(line.advice)}", **options)  # type: ignore[arg-type]
    return "\n".join(wrapped)


def skipped_as_text(lines: list[Line]) -> list[str]:
    """Format the skipped lines, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for line in lines:
        if line.status is Status.SKIPPED:
            by_reason.setdefault(line.text, []).append(line.name)
    return [
        as_text(Line(names[0], Status.SKIPPED, f"{reason}; also {', '.join(names[1:])}" if names[1:] else reason))
        for reason, names in by_reason.items()
    ]


def summary(lines: list[Line], seconds: float) -> str:
    """Format the last line: whether every required check passed."""
    failures = [line.name for line in lines if line.status is Status.FAILED]
    count = sum(line.status is not Status.SKIPPED for line in lines)
    extent = f"{count} {'check' if count == 1 else 'checks'}, {seconds:.0f} s"
    if failures:
        return f"FAILED: {', '.join(failures)} ({extent})."
    return f"All checks passed ({extent})."


def as_json(lines: list[Line], seconds: float) -> str:
    """Format all lines with their data, for a bug report."""
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
