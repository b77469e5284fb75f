"""`make size`: print what makes the project hard to read, and fail if it exceeds a limit.

There is no limit on lines or words: sparse is better than dense.
"""

import ast
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_qurl"
LONGEST_FILE, LONGEST_FUNCTION = 400, 60

LIMITS: dict[str, int] = {
    f"files over {LONGEST_FILE} lines": 0,
    f"functions over {LONGEST_FUNCTION} lines": 0,
    "uses of substitute": 8,
    "settings added to TRL's": 22,
    "entries in trl_qurl/": 13,
}
"""Limit of each figure."""


def count_lines(path: Path) -> int:
    """The lines of one file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def python_files(folder: Path) -> list[Path]:
    """The Python files of a folder and the folders in it."""
    return sorted(folder.rglob("*.py"))


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
    figures = [
        len(long),
        len(functions),
        sum(len(substitutions(path)) for path in core),
        len(added_fields()),
        len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]),
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
