"""`make size`: count tokens, measure density, and fail where something exceeds its limit.

Neither lines nor words are limited: that made the code dense instead of small. Tokens (names,
numbers, operators, and strings that are no docstrings) stay the same however they are laid out.
Density has limits, so nothing is packed into fewer lines.
"""

import ast
import dataclasses
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_qurl"
LONGEST_FILE = 400
LONGEST_FUNCTION = 60
FULLEST_LINE = 22  # syntax nodes that begin on one line

KINDS = (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

PARTS = {
    "core": [path for path in PACKAGE.rglob("*.py") if PACKAGE / "lab" not in path.parents],
    "lab": list((PACKAGE / "lab").rglob("*.py")),
    "tests": list((ROOT / "tests").rglob("*.py")),
    "benchmarks": list((ROOT / "benchmarks").rglob("*.py")),
}


@dataclasses.dataclass
class Density:
    """What makes code dense, counted over files."""

    tokens: int = 0
    code_lines: int = 0  # without comments, docstrings and blank lines
    pairs: int = 0  # assignments such as `a, b = x, y`
    walruses: int = 0
    nested: int = 0  # comprehensions inside others, or with two loops
    untyped: int = 0  # uses of `Any`
    fullest: int = 0  # syntax nodes on the fullest line
    fullest_place: str = ""

    def add(self, path: Path) -> None:
        """Count a file."""
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        documented = docstring_lines(tree)
        self.tokens += count_tokens(source, documented)
        for number, line in enumerate(source.splitlines(), 1):
            is_comment = line.strip().startswith("#")
            if line.strip() and not is_comment and number not in documented:
                self.code_lines += 1
        starts: Counter[int] = Counter()
        for node in ast.walk(tree):
            if hasattr(node, "lineno"):
                starts[node.lineno] += 1
            self._count(node)
        for line, count in starts.most_common(1):
            if count > self.fullest:
                self.fullest = count
                self.fullest_place = f"{path.relative_to(ROOT)}:{line}"

    def _count(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            self.pairs += isinstance(node.targets[0], ast.Tuple)
        if isinstance(node, ast.NamedExpr):
            self.walruses += 1
        if isinstance(node, ast.Name) and node.id == "Any":
            self.untyped += 1
        if isinstance(node, COMPREHENSIONS):
            others = (other for other in ast.walk(node) if other is not node)
            is_nested = any(isinstance(other, COMPREHENSIONS) for other in others)
            self.nested += is_nested or len(node.generators) > 1

    def per_thousand(self, count: int) -> float:
        """Return a count per 1,000 lines of code."""
        return 1000 * count / max(1, self.code_lines)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of all lines inside docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def count_tokens(source: str, documented: set[int]) -> int:
    """Count names, numbers, operators and strings outside of documented lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type in KINDS and token.start[0] not in documented for token in tokens)


def measure(paths: Iterable[Path]) -> Density:
    """Return the density of some files together."""
    density = Density()
    for path in sorted(paths):
        density.add(path)
    return density


def long_files(paths: Iterable[Path]) -> list[str]:
    """Return the files that are too long, with their lines."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return [
        f"{path.relative_to(ROOT)}: {length}"
        for path, length in lengths.items()
        if length > LONGEST_FILE
    ]


def long_functions(path: Path) -> list[str]:
    """Return the functions of a file that are too long, with their lines."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, FUNCTIONS):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                found.append(f"{path.relative_to(ROOT)}, {node.name}: {length}")
    return found


def substitutions(path: Path) -> int:
    """Count the calls of `substitute` in a file."""
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return sum(call.func.id == "substitute" for call in calls)


def added_fields() -> set[str]:
    """Return the settings that our configurations add to TRL's."""
    from trl import GRPOConfig, RLOOConfig

    from trl_qurl import QuRLPPOConfig, QuRLRLOOConfig

    ours = (QuRLPPOConfig, QuRLRLOOConfig)
    fields = {field.name for each in ours for field in dataclasses.fields(each)}
    theirs = {field.name for each in (GRPOConfig, RLOOConfig) for field in dataclasses.fields(each)}
    return fields - theirs


def print_density() -> Density:
    """Print a row per part of the repository, and return the core's figures."""
    titles = ("tokens", "a line", "pairs", "walruses", "nested", "Any", "fullest line")
    print(f"{'':12}" + "".join(f"{title:>10}" for title in titles[:-1]) + f"  {titles[-1]}")
    parts = {name: measure(paths) for name, paths in PARTS.items()}
    for name, part in parts.items():
        rates = [
            part.per_thousand(count)
            for count in (part.pairs, part.walruses, part.nested, part.untyped)
        ]
        row = f"{part.tokens:10,}{part.tokens / part.code_lines:10.1f}"
        row += "".join(f"{rate:10.1f}" for rate in rates)
        print(f"{name:12}{row}  {part.fullest} {part.fullest_place}")
    print("(pairs to Any: per 1,000 lines of code; the fullest line: in syntax nodes)\n")
    return parts["core"]


def main() -> int:
    """Print all figures; return 1 if one exceeds its limit."""
    core = print_density()
    package = [*PARTS["core"], *PARTS["lab"]]
    files = long_files(package)
    functions = [text for path in package for text in long_functions(path)]
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    limits = {
        f"files over {LONGEST_FILE} lines": (len(files), 0),
        f"functions over {LONGEST_FUNCTION} lines": (len(functions), 0),
        "syntax nodes on the core's fullest line": (core.fullest, FULLEST_LINE),
        # A commit may lower it, and raise it only with a line in CHANGELOG.md that says for what.
        "tokens of the core": (core.tokens, 61_930),
        "uses of substitute": (sum(map(substitutions, PARTS["core"])), 8),
        "settings added to TRL's": (len(added_fields()), 21),
        "entries in trl_qurl/": (len(entries), 13),
    }
    for name, (figure, limit) in limits.items():
        mark = ", EXCEEDED" if figure > limit else ""
        print(f"{name:<40} {figure:>4}  at most {limit}{mark}")
    for offender in (*files, *functions):
        print(f"  {offender}")
    return int(any(figure > limit for figure, limit in limits.values()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
