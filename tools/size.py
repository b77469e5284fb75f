"""`make size`: print how large the project is, and fail if it exceeds a limit.

Lines are those of Python files, including blank lines and docstrings. The core is everything in trl_qurl/ except lab/.
Words are those of docs/ and the README, without code blocks. Limits only go down: a feature that needs more lines has
to replace others.
"""

import ast
import dataclasses
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_qurl"
LONGEST_FILE, LONGEST_FUNCTION = 300, 60


def count_lines(path: Path) -> int:
    """The lines of one file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def python_files(folder: Path) -> list[Path]:
    """The Python files of a folder and the folders in it."""
    return sorted(folder.rglob("*.py"))


def total(paths: Iterable[Path]) -> int:
    """The lines of several files."""
    return sum(map(count_lines, paths))


def long_functions(path: Path) -> list[str]:
    """The functions of a file that are too long, with their lines."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, functions)]
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes}
    return [f"{path.relative_to(ROOT)}, {name}: {n}" for name, n in lengths.items() if n > LONGEST_FUNCTION]


def count_words(page: Path) -> int:
    """The words of a page, without code blocks and comments."""
    return len(re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).split())


def added_fields() -> list[str]:
    """The settings that our configurations add to TRL's."""
    from trl import GRPOConfig, RLOOConfig

    from trl_qurl import config

    ours = [getattr(config, name) for name in config.__all__ if name.endswith("Config")]
    inherited = {field.name for theirs in (GRPOConfig, RLOOConfig) for field in dataclasses.fields(theirs)}
    return sorted({field.name for cls in ours for field in dataclasses.fields(cls)} - inherited)


def main() -> int:
    """Print one line per figure; return 1 if one exceeds its limit."""
    lab = python_files(PACKAGE / "lab")
    core = [path for path in python_files(PACKAGE) if path not in lab]
    long = [f"{path.relative_to(ROOT)}: {n}" for path in (*core, *lab) if (n := count_lines(path)) > LONGEST_FILE]
    functions = [function for path in (*core, *lab) for function in long_functions(path)]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    rows = [
        ("core, lines", total(core), 8_550),
        ("lab, lines", total(lab), 5_000),
        ("tests, lines", total(python_files(ROOT / "tests")), None),
        (f"files over {LONGEST_FILE} lines", len(long), 0),
        (f"functions over {LONGEST_FUNCTION} lines", len(functions), 0),
        ("settings added to TRL's", len(added_fields()), 22),
        ("entries in trl_qurl/", len(entries), 12),
        ("pages in docs/ and README", len(pages), 20),
        ("words on them", sum(map(count_words, pages)), 20_000),
    ]
    for name, found, goal in rows:
        limit = "" if goal is None else f"  at most {goal:,}{'' if found <= goal else ', EXCEEDED'}"
        print(f"{name:<26} {found:>7,}{limit}")
    for offender in (*long, *functions):
        print(f"  {offender}")
    return int(any(goal is not None and found > goal for _, found, goal in rows))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
