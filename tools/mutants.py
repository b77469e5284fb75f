"""Change single lines at random, and see whether a test notices.

    python tools/mutants.py --since COMMIT --count 30 --minutes 40

It works in a copy of the repository. Each mutant is one small change of the core (a comparison, a
number, a condition, a deleted call) on a line that is newer than COMMIT. The tests of the files
that import the changed module run first, then those that start engines. The table is printed in
Markdown. A mutant that lives is either a missing test, or a change that nothing can notice.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "trl_qurl"
MOST_PER_FILE = 3
SECONDS = 150  # for the tests of one mutant
TIME_IS_UP = "time is up"
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATIONS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
ENGINES = ("engine", "proof", "saving", "stops", "ppo_training", "conformance", "ahead", "faults")


class Mutant(NamedTuple):
    """A small change of a file."""

    path: Path  # relative to the repository
    line: int
    before: str
    after: str
    source: str  # of the whole file


def new_lines(commit: str) -> dict[Path, set[int]]:
    """Return the core's lines that are newer than a commit, by file."""
    command = ["git", "diff", "--unified=0", commit, "HEAD", "--", PACKAGE]
    diff = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines: dict[Path, set[int]] = {}
    path = Path()
    for row in diff.splitlines():
        if row.startswith("+++ b/"):
            path = Path(row.removeprefix("+++ b/"))
        hunk = re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", row)
        if hunk and path.suffix == ".py" and "lab" not in path.parts:
            start = int(hunk[1])
            lines.setdefault(path, set()).update(range(start, start + int(hunk[2] or 1)))
    return lines


def changed(node: ast.AST) -> ast.AST | None:
    """Return another node in place of this one, or `None` if it is of no interest."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            other.ops = [COMPARISONS[type(operator)]()]
        case ast.BoolOp(op=ast.And()):
            other.op = ast.Or()
        case ast.BoolOp(op=ast.Or()):
            other.op = ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.BinOp(op=operator) if type(operator) in OPERATIONS:
            other.op = OPERATIONS[type(operator)]()
        case ast.Constant(value=bool()):
            other.value = not other.value
        case ast.Constant(value=int() | float()):
            other.value = other.value + 1
        case ast.If(test=test):
            other.test = ast.UnaryOp(ast.Not(), test)
        case ast.IfExp(test=test):
            other.test = ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=ast.expr()):
            other.value = ast.Constant(None)
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
        case _:
            return None
    return other


def mutants_of(path: Path, lines: set[int]) -> Iterator[Mutant]:
    """Yield all mutants of a file that begin on these lines."""
    source = (ROOT / path).read_text(encoding="utf-8")
    rows = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if getattr(node, "lineno", 0) not in lines or is_message(node):
            continue
        other = changed(node)
        if other is None:
            continue
        start = node.lineno - 1
        end = node.end_lineno - 1
        head = rows[start].encode()[: node.col_offset].decode()
        tail = rows[end].encode()[node.end_col_offset :].decode()
        indent = " " * (len(head) - len(head.lstrip()))
        text = ast.unparse(ast.fix_missing_locations(other)).replace("\n", f"\n{indent}")
        if isinstance(node, ast.expr):
            text = f"({text})"
        mutated = "".join(rows[:start]) + head + text + tail + "".join(rows[end + 1 :])
        before = ast.unparse(node).splitlines()[0]
        yield Mutant(path, node.lineno, before, text.splitlines()[0], mutated)


def is_message(node: ast.AST) -> bool:
    """Return whether a node only logs, warns or raises."""
    text = ast.unparse(node)
    return text.startswith(("logger.", "warnings.", "raise ")) or "logger." in text[:200]


def draw(lines: dict[Path, set[int]], count: int, seed: int) -> list[Mutant]:
    """Draw mutants that Python can compile, at most `MOST_PER_FILE` of a file."""
    candidates = [mutant for path in sorted(lines) for mutant in mutants_of(path, lines[path])]
    random.Random(seed).shuffle(candidates)
    chosen: list[Mutant] = []
    by_file: Counter[Path] = Counter()
    for mutant in candidates:
        try:
            compile(mutant.source, str(mutant.path), "exec")
        except SyntaxError:
            continue
        if by_file[mutant.path] < MOST_PER_FILE and len(chosen) < count:
            by_file[mutant.path] += 1
            chosen.append(mutant)
    return chosen


def tests_of(path: Path, root: Path) -> list[str]:
    """Return the test files that name a module, or a part of its package."""
    module = ".".join(path.with_suffix("").parts)
    files = sorted((root / "tests").glob("test_*.py"))
    found = [file for file in files if module in file.read_text(encoding="utf-8")]
    if not found:
        package = module.rpartition(".")[0]
        found = [file for file in files if package in file.read_text(encoding="utf-8")]
    return [f"tests/{file.name}" for file in found]


def killer(root: Path, files: list[str], marks: str) -> str:
    """Run tests, and return the first that fails, or that time is up; empty if all pass."""
    files = [file for file in files if (root / file).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "2"]
    command += ["--dist", "loadgroup", "-m", marks, *files]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return TIME_IS_UP
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else ""


def main() -> int:
    """Draw mutants, run tests on each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--since", required=True)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".venv", ".git", "site"))
        print("| line | change | noticed by |\n|---|---|---|")
        for mutant in draw(new_lines(args.since), args.count, args.seed):
            if time.monotonic() > deadline:
                break
            target = root / mutant.path
            original = target.read_text(encoding="utf-8")
            target.write_text(mutant.source, encoding="utf-8")
            files = tests_of(mutant.path, root)
            found = killer(root, files, "not vllm and not slow and not simulated_gpu")
            if found in ("", TIME_IS_UP):
                engines = [f"tests/test_{name}.py" for name in ENGINES]
                found = killer(root, [*files, *engines], "vllm and not slow")
            target.write_text(original, encoding="utf-8")
            change = f"`{mutant.before[:60]}` → `{mutant.after[:60]}`".replace("|", "\\|")
            print(f"| {mutant.path}:{mutant.line} | {change} | {found or '**none**'} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
