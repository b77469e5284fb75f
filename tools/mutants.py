"""Change single lines at random, and see whether a test notices.

    python tools/mutants.py draw --count 60 mutants.json      # of the whole package, or:
    python tools/mutants.py draw --since COMMIT mutants.json  # of lines that are newer
    python tools/mutants.py run mutants.json --minutes 60
    python tools/mutants.py run mutants.json --again          # after tests were removed

A mutant is one small change: a comparison, a number, a condition, a deleted call. `run` works in a
copy of the repository, and writes after each mutant, so it can be stopped and goes on. The tests
that name the changed module run first, then those that start engines. `--again` runs what was
killed before: the test that killed it, and the others only if that one is gone or passes. The
table is printed in Markdown. A mutant that lives is either a missing test, or a change that nothing
can notice.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

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
ENGINES = (
    "engine",
    "proof",
    "saving",
    "stops",
    "ppo_training",
    "conformance",
    "ahead",
    "faults",
    "adapter_server",
)


COMMANDS = ("evaluation", "bench", "mismatch", "recipes", "doctor")
"""Tests with engines, of the library and of the lab."""


@dataclass
class Mutant:
    """A small change of a file, which is found again where the file has changed elsewhere."""

    path: str  # relative to the repository
    line: int
    before: str  # as `ast.unparse` writes it
    after: str
    killer: str | None = None  # the first test that failed, empty if none did; None: not run


def new_lines(commit: str) -> dict[Path, set[int]]:
    """Return the package's lines that are newer than a commit, by file."""
    command = ["git", "diff", "--unified=0", commit, "HEAD", "--", PACKAGE]
    diff = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines: dict[Path, set[int]] = {}
    path = Path()
    for row in diff.splitlines():
        if row.startswith("+++ b/"):
            path = Path(row.removeprefix("+++ b/"))
        hunk = re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", row)
        if hunk and path.suffix == ".py":
            start = int(hunk[1])
            lines.setdefault(path, set()).update(range(start, start + int(hunk[2] or 1)))
    return lines


def all_lines() -> dict[Path, set[int]]:
    """Return all lines of the package, by file."""
    files = (ROOT / PACKAGE).rglob("*.py")
    return {
        file.relative_to(ROOT): set(range(1, 1 + len(file.read_bytes().splitlines())))
        for file in files
    }


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
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if getattr(node, "lineno", 0) not in lines or is_message(node):
            continue
        other = changed(node)
        if other is not None:
            after = ast.unparse(ast.fix_missing_locations(other))
            yield Mutant(str(path), node.lineno, ast.unparse(node), after)


def mutated(source: str, mutant: Mutant) -> str | None:
    """Return a file's text with the change, or `None` where what it changes is gone."""
    places = [
        node
        for node in ast.walk(ast.parse(source))
        if hasattr(node, "lineno") and ast.unparse(node) == mutant.before and changed(node)
    ]
    if not places:
        return None
    node = min(places, key=lambda place: abs(place.lineno - mutant.line))
    rows = source.splitlines(keepends=True)
    first, last = rows[node.lineno - 1], rows[node.end_lineno - 1]
    head = first.encode()[: node.col_offset].decode()
    tail = last.encode()[node.end_col_offset :].decode()
    indent = " " * (len(head) - len(head.lstrip()))
    text = mutant.after.replace("\n", f"\n{indent}")
    if isinstance(node, ast.expr):
        text = f"({text})"
    return "".join([*rows[: node.lineno - 1], head, text, tail, *rows[node.end_lineno :]])


def is_message(node: ast.AST) -> bool:
    """Return whether a node only logs, warns or raises."""
    text = ast.unparse(node)
    return text.startswith(("logger.", "warnings.", "raise ")) or "logger." in text[:200]


def draw(lines: dict[Path, set[int]], count: int, seed: int) -> list[Mutant]:
    """Draw mutants that Python can compile, at most `MOST_PER_FILE` of a file."""
    candidates = [mutant for path in sorted(lines) for mutant in mutants_of(path, lines[path])]
    random.Random(seed).shuffle(candidates)
    chosen: list[Mutant] = []
    by_file: Counter[str] = Counter()
    for mutant in candidates:
        text = mutated((ROOT / mutant.path).read_text(encoding="utf-8"), mutant)
        try:
            compile(text or "", mutant.path, "exec")
        except SyntaxError:
            continue
        if text and by_file[mutant.path] < MOST_PER_FILE and len(chosen) < count:
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
    files = [file for file in files if (root / file.partition("::")[0]).exists()]
    if not files:
        return ""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "2"]
    command += ["--dist", "loadgroup", "-m", marks, *files]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # pytest's workers and engines, too
            return TIME_IS_UP
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", output, re.MULTILINE)
    return failed[1] if failed else ""


def killer_of(root: Path, mutant: Mutant) -> str | None:
    """Run the tests that may notice a mutant; `None` where what it changes is gone."""
    target = root / mutant.path
    original = target.read_text(encoding="utf-8") if target.exists() else ""
    text = mutated(original, mutant)
    if text is None:
        return None
    target.write_text(text, encoding="utf-8")
    try:
        if mutant.killer:
            test = re.sub(r"(\[.*|@\w+)$", "", f"tests/{mutant.killer}")  # with all its cases
            found = killer(root, [test], "vllm or not vllm")
            if found:
                return found
        files = tests_of(Path(mutant.path), root)
        found = killer(root, files, "not vllm and not slow and not simulated_gpu")
        if found in ("", TIME_IS_UP):
            names = COMMANDS if "/lab/" in mutant.path else ENGINES
            engines = [f"tests/test_{name}.py" for name in names]
            found = killer(root, [*files, *engines], "vllm and not slow") or found
        return found
    finally:
        target.write_text(original, encoding="utf-8")


def run(file: Path, minutes: float, again: bool) -> None:
    """Run tests on each mutant of a file, and store what killed it."""
    deadline = time.monotonic() + 60 * minutes
    mutants = [Mutant(**row) for row in json.loads(file.read_text())]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".venv", ".git", "site"))
        print("| line | change | noticed by |\n|---|---|---|")
        for mutant in mutants:
            if time.monotonic() > deadline:
                break
            if again and not mutant.killer or not again and mutant.killer is not None:
                continue
            found = killer_of(root, mutant)
            if found is not None and not again:
                mutant.killer = found
                file.write_text(json.dumps([asdict(each) for each in mutants], indent=1) + "\n")
            print(row_of(mutant, "gone" if found is None else found or "**none**"), flush=True)


def row_of(mutant: Mutant, found: str) -> str:
    """Return a mutant's row of the table."""
    before, after = (text.splitlines()[0][:60] for text in (mutant.before, mutant.after))
    change = f"`{before}` → `{after}`".replace("|", "\\|")
    return f"| {mutant.path}:{mutant.line} | {change} | {found} |"


def main() -> int:
    """Draw mutants, or run tests on each and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("file", type=Path)
    drawing.add_argument("--since")
    drawing.add_argument("--count", type=int, default=30)
    drawing.add_argument("--seed", type=int, default=0)
    running = commands.add_parser("run")
    running.add_argument("file", type=Path)
    running.add_argument("--minutes", type=float, default=60)
    running.add_argument("--again", action="store_true")
    args = parser.parse_args()
    if args.command == "run":
        run(args.file, args.minutes, args.again)
    else:
        lines = new_lines(args.since) if args.since else all_lines()
        mutants = draw(lines, args.count, args.seed)
        args.file.write_text(json.dumps([asdict(each) for each in mutants], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
