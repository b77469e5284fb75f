"""`make size`: print how large the project is, and fail if it exceeds a limit.

Lines are those of Python files, including blank lines and docstrings. The core is everything in trl_qurl/ except lab/.
Words do not include code blocks. A limit is what its part needs plus a little room: lower it after a part has become
smaller, and raise it only with a reason in the commit that does so.
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

LIMITS: dict[str, int] = {
    "core, lines": 8_550,
    "lab, lines": 5_340,
    "tests, lines": 21_780,
    "benchmarks, lines": 4_800,
    f"files over {LONGEST_FILE} lines": 0,
    f"functions over {LONGEST_FUNCTION} lines": 0,
    "uses of substitute": 8,
    "settings added to TRL's": 22,
    "entries in trl_qurl/": 12,
    "pages in docs/ and README": 20,
    "words on them": 20_000,
    "words of other Markdown": 20_000,
}
"""Limit of each figure."""


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


def substitutions(path: Path) -> list[str]:
    """The calls of `substitute`, each with its place."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    names = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "substitute"]
    return [f"{path.relative_to(ROOT)}:{node.lineno}" for node in names]


def count_words(page: Path) -> int:
    """The words of a page, without code blocks and comments."""
    return len(re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).split())


def other_pages() -> list[Path]:
    """The Markdown pages outside docs/, with the README: changelog, benchmarks, tests, environments."""
    folders = [".github", "benchmarks", "notebooks", "requirements", "tests"]
    pages = [page for folder in folders for page in (ROOT / folder).rglob("*.md")]
    return sorted([*pages, *ROOT.glob("*.md")])


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
    figures = [
        total(core),
        total(lab),
        total(python_files(ROOT / "tests")),
        total(python_files(ROOT / "benchmarks")),
        len(long),
        len(functions),
        sum(len(substitutions(path)) for path in core),
        len(added_fields()),
        len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]),
        len(pages),
        sum(map(count_words, pages)),
        sum(map(count_words, other_pages())),
    ]
    exceeded = False
    for (name, goal), figure in zip(LIMITS.items(), figures, strict=True):
        is_over = figure > goal
        print(f"{name:<26} {figure:>7,}  at most {goal:,}{', EXCEEDED' if is_over else ''}")
        exceeded |= is_over
    for offender in (*long, *functions):
        print(f"  {offender}")
    return int(exceeded)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
