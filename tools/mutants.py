"""Draw mutants: single small changes that a test should notice.

    python tools/mutants.py --count 60 mutants.json      # of the whole package, or:
    python tools/mutants.py --since COMMIT mutants.json  # of lines that are newer

A mutant changes a comparison, a number or a condition, or deletes a call. `tools/kill_matrix.py`
runs tests on them. A mutant that lives is either a missing test, or a change that nothing can
notice.
"""

import argparse
import ast
import copy
import json
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "trl_qurl"
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


@dataclass
class Mutant:
    """A small change of a file, which is found again where the file has changed elsewhere."""

    path: str  # relative to the repository
    line: int
    before: str  # as `ast.unparse` writes it
    after: str


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
        case ast.If(test=ast.Name("TYPE_CHECKING")):
            return None
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


def changed_node(source: str, mutant: Mutant) -> ast.AST | None:
    """Return the nearest node that is what a mutant changes, as lines may have moved."""
    places = [
        node
        for node in ast.walk(ast.parse(source))
        if hasattr(node, "lineno") and ast.unparse(node) == mutant.before and changed(node)
    ]
    return min(places, key=lambda place: abs(place.lineno - mutant.line), default=None)


def mutated(source: str, mutant: Mutant) -> str | None:
    """Return a file's text with the change, or `None` where what it changes is gone."""
    node = changed_node(source, mutant)
    if node is None:
        return None
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


def draw(lines: dict[Path, set[int]], count: int, most: int, seed: int) -> list[Mutant]:
    """Draw mutants that Python can compile, at most `most` of a file."""
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
        if text and by_file[mutant.path] < most and len(chosen) < count:
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


def main() -> int:
    """Draw mutants, and write them to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--since", metavar="COMMIT")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--most", type=int, default=3, help="of one file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines = new_lines(args.since) if args.since else all_lines()
    mutants = draw(lines, args.count, args.most, args.seed)
    args.file.write_text(json.dumps([asdict(each) for each in mutants], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
