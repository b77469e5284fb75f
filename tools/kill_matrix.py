"""Which tests notice which mutants: all of them, not only the first.

    python tools/mutants.py --count 1000 --most 6 mutants.json
    python tools/kill_matrix.py lines lines.json        # which test runs which line
    python tools/kill_matrix.py run mutants.json lines.json matrix.json --minutes 60
    python tools/kill_matrix.py show                    # the stored matrix, by file
    python tools/kill_matrix.py living                  # what no test notices
    python tools/kill_matrix.py cover                   # tests that together notice the rest

For tests that start no engine. `lines` runs them once in one process, and needs `pip install
coverage`. `run` imports the libraries once, and forks for each mutant: the fork runs the tests that
run the mutant's line, and where none of these notices it, those of the files that name the module
and start processes. It works in a copy, and writes after each mutant, so it can be stopped and goes
on. What no test notices here may still be noticed by an engine's.
"""

import argparse
import ast
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mutants as drawing
import pytest

STORED = Path(__file__).with_name("kill_matrix.jsonl")
FAST = "not vllm and not slow and not simulated_gpu"
FIXTURE = "fixture of "
MOST_SECONDS = 90  # of tests in one process, for one mutant; the cheapest run
PROCESS_SECONDS = 20  # of tests that start processes
LIBRARIES = (
    "hypothesis",
    "llmcompressor",
    "math_verify",
    "matplotlib.figure",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "trl.generation.vllm_generation",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""What most tests import, and no mutant changes."""


class Lines:
    """pytest's plugin that measures which test, or shared fixture, runs which line."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.now = ""
        self.seconds: Counter[str] = Counter()
        self.passed: set[str] = set()
        self.users: defaultdict[str, list[str]] = defaultdict(list)
        self.starts_processes: set[str] = set()
        sys.addaudithook(self.note_process)

    def note_process(self, event: str, _: tuple) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self.starts_processes.add(self.now)

    def enter(self, name: str) -> None:
        self.now = name
        self.coverage.switch_context(name)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.enter(item.nodeid)
        result = yield
        self.enter("")
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """A fixture that tests share is run by the first of them, and belongs to all."""
        if fixturedef.scope == "function":
            return (yield)
        before = self.now
        self.enter(f"{FIXTURE}{fixturedef.baseid}: {fixturedef.argname}")
        result = yield
        self.enter(before)
        return result

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for name, definitions in item._fixtureinfo.name2fixturedefs.items():
                for definition in definitions:
                    self.users[f"{FIXTURE}{definition.baseid}: {name}"].append(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def measure_lines(file: Path) -> None:
    """Run the fast tests once, and write which of them runs which line."""
    import coverage

    os.chdir(drawing.ROOT)
    coverage = coverage.Coverage(data_file=None, source=["trl_qurl"], config_file=False)
    plugin = Lines(coverage)
    coverage.start()
    pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", "-m", FAST], plugins=[plugin])
    coverage.stop()
    data = coverage.get_data()
    lines: dict[str, dict[int, list[str]]] = {}
    for path in data.measured_files():
        name = str(Path(path).relative_to(drawing.ROOT))
        lines[name] = {
            line: sorted(with_users(contexts, plugin))
            for line, contexts in data.contexts_by_lineno(path).items()
        }
    found = {
        "seconds": {test: round(plugin.seconds[test], 2) for test in sorted(plugin.passed)},
        "starts processes": sorted(plugin.starts_processes & plugin.passed),
        "lines": lines,
    }
    file.write_text(json.dumps(found))


def with_users(contexts: Iterable[str], plugin: Lines) -> set[str]:
    """Return the tests of contexts that passed; an import's is the empty one."""
    tests: set[str] = set()
    for context in contexts:
        tests.update(plugin.users.get(context, [context]))
    return tests & (plugin.passed | {""})


class Results:
    """pytest's plugin that writes the outcome of each test to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.failed: set[str] = set()
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.file.write_text(json.dumps(sorted(self.passed - self.failed)))


class Workshop:
    """A copy of the repository in which mutants are tried."""

    def __init__(self, directory: Path, lines: dict[str, Any]) -> None:
        self.copy = directory / "copy"
        self.results = directory / "results.json"
        self.log = directory / "log"
        self.seconds = lines["seconds"]
        self.starts_processes = set(lines["starts processes"])
        self.lines = lines["lines"]
        ignored = shutil.ignore_patterns(".venv", "site")
        shutil.copytree(drawing.ROOT, self.copy, symlinks=True, ignore=ignored)
        self.texts = {file.name: file.read_text() for file in self.copy.glob("tests/test_*.py")}
        conftest = self.copy / "tests" / "conftest.py"
        # A failing example need not be made smaller.
        text = conftest.read_text().replace(
            "deadline=None,", "deadline=None, derandomize=True, database=None, phases=PHASES,", 1
        )
        phases = (
            "import hypothesis\n\nPHASES = [hypothesis.Phase.explicit, hypothesis.Phase.generate]\n"
        )
        conftest.write_text(text.replace("import gc\n", f"import gc\n{phases}", 1))

    def killers(self, mutant: drawing.Mutant) -> list[str] | None:
        """Return the tests that notice a mutant, or `None` if it cannot be made."""
        target = self.copy / mutant.path
        source = target.read_text(encoding="utf-8")
        text = drawing.mutated(source, mutant)
        if text is None:
            return None
        target.write_text(text, encoding="utf-8")
        try:
            running = self.tests_of_line(mutant, source)
            return self.noticed_by(running) or self.noticed_by(self.processes_of(mutant, running))
        finally:
            target.write_text(source, encoding="utf-8")

    def tests_of_line(self, mutant: drawing.Mutant, source: str) -> list[str]:
        """Return the tests that run a mutant's line, or, for what an import runs, its file."""
        node = drawing.changed_node(source, mutant)
        end = node.test.end_lineno if isinstance(node, ast.If) else node.end_lineno
        by_line = self.lines.get(mutant.path, {})
        tests = {
            test for line in range(node.lineno, end + 1) for test in by_line.get(str(line), [])
        }
        if tests == {""}:
            tests = {test for row in by_line.values() for test in row}
        return within(
            sorted(tests - {""}, key=self.seconds.__getitem__), self.seconds, MOST_SECONDS
        )

    def processes_of(self, mutant: drawing.Mutant, others: list[str]) -> list[str]:
        """Return tests that start processes, of the files that name a mutant's module."""
        files = {Path(file).name for file in drawing.tests_of(Path(mutant.path), self.copy)}
        tests = [
            test
            for test in self.starts_processes - set(others)
            if Path(test.partition("::")[0]).name in files
        ]
        ordered = sorted(tests, key=self.seconds.__getitem__)
        return within(ordered, self.seconds, PROCESS_SECONDS)

    def noticed_by(self, tests: list[str]) -> list[str]:
        """Run tests in a fork, and return those that do not pass."""
        if not tests:
            return []
        self.results.unlink(missing_ok=True)
        process = os.fork()
        if process == 0:
            try:
                self.run(tests)
            finally:
                os._exit(99)
        deadline = time.monotonic() + 30 + 4 * sum(self.seconds[test] for test in tests)
        while time.monotonic() < deadline and not os.waitpid(process, os.WNOHANG)[0]:
            time.sleep(0.02)
        try:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        if not self.results.exists():  # it hung, or nothing could be imported
            return tests
        return sorted(set(tests) - set(json.loads(self.results.read_text())))

    def run(self, tests: list[str]) -> None:
        os.setsid()
        os.chdir(self.copy)
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, str(self.copy))
        options = ["-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-n", "0"]
        options += ["-m", FAST, "--rootdir", str(self.copy)]
        os._exit(int(pytest.main([*options, *tests], plugins=[Results(self.results)])))


def within(tests: list[str], seconds: dict[str, float], most: float) -> list[str]:
    """Return the first tests that together take no longer than this."""
    chosen = []
    for test in tests:
        most -= seconds[test]
        if most < 0:
            break
        chosen.append(test)
    return chosen


def run(mutants: Path, lines: Path, file: Path, minutes: float) -> None:
    """Try each mutant that has not been tried, and write all that notice it."""
    deadline = time.monotonic() + 60 * minutes
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["TRL_QURL_TESTS_PYTHON"] = sys.executable
    for name in LIBRARIES:
        importlib.import_module(name)
    rows = read(file) if file.exists() else []
    tried = [{**row, "killers": None} for row in rows]
    with tempfile.TemporaryDirectory() as directory:
        workshop = Workshop(Path(directory), json.loads(lines.read_text()))
        os.environ["PYTHONPATH"] = str(workshop.copy)
        for drawn in json.loads(mutants.read_text()):
            if time.monotonic() > deadline:
                break
            if {**drawn, "killers": None} in tried:
                continue
            killers = workshop.killers(drawing.Mutant(**drawn))
            if killers is None:
                continue
            rows.append({**drawn, "killers": by_function(killers)})
            write(rows, file)
            print(f"{drawn['path']}:{drawn['line']} {len(killers)}", flush=True)


def write(rows: list[dict[str, Any]], file: Path) -> None:
    """Write a matrix: the names of tests once, and one mutant a line."""
    names = sorted({name for row in rows for name in row["killers"]})
    numbers = {name: number for number, name in enumerate(names)}
    lines = [json.dumps(names)]
    for row in rows:
        killers = {numbers[name]: cases for name, cases in row["killers"].items()}
        lines.append(json.dumps({**row, "killers": killers}))
    file.write_text("\n".join(lines) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """Read a matrix: for each mutant the tests that notice it, with how many of their cases."""
    names, *rows = map(json.loads, file.read_text().splitlines())
    for row in rows:
        row["killers"] = {names[int(number)]: cases for number, cases in row["killers"].items()}
    return rows


def by_function(tests: Iterable[str]) -> dict[str, int]:
    """Return the test functions of cases, with the number of their cases."""
    return dict(sorted(Counter(re.sub(r"\[.*", "", test) for test in tests).items()))


def show(rows: list[dict[str, Any]]) -> None:
    """Print, by file, how many mutants were tried, how many live, and who notices the rest."""
    files: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        files[row["path"]].append(row)
    print("| file | mutants | living | cases that notice one, median |\n|---|---|---|---|")
    for path, group in sorted(files.items()):
        counts = sorted(sum(row["killers"].values()) for row in group if row["killers"])
        median = counts[len(counts) // 2] if counts else 0
        print(f"| {path} | {len(group)} | {len(group) - len(counts)} | {median} |")
    tried = [row for group in files.values() for row in group]
    print(f"\n{len(tried)} mutants, of which {sum(not row['killers'] for row in tried)} live")


def cover(rows: list[dict[str, Any]]) -> list[str]:
    """Return a small set of test functions that notices all that any notices."""
    noticed: defaultdict[str, set[int]] = defaultdict(set)
    for number, row in enumerate(rows):
        for function in row["killers"]:
            noticed[function].add(number)
    left = set().union(*noticed.values())
    chosen = []
    while left:
        best = max(sorted(noticed), key=lambda function: len(noticed[function] & left))
        chosen.append(best)
        left -= noticed[best]
    return chosen


def main() -> int:
    """Measure lines, run tests on mutants, or print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lines").add_argument("file", type=Path)
    running = commands.add_parser("run")
    running.add_argument("mutants", type=Path)
    running.add_argument("lines", type=Path)
    running.add_argument("matrix", type=Path)
    running.add_argument("--minutes", type=float, default=60)
    for name in ("show", "living", "cover"):
        commands.add_parser(name).add_argument("matrix", type=Path, nargs="?", default=STORED)
    args = parser.parse_args()
    match args.command:
        case "lines":
            measure_lines(args.file)
        case "run":
            run(args.mutants, args.lines, args.matrix, args.minutes)
        case "show":
            show(read(args.matrix))
        case "living":
            for row in read(args.matrix):
                if not row["killers"]:
                    before, after = (row[name].splitlines()[0][:60] for name in ("before", "after"))
                    print(f"{row['path']}:{row['line']}: {before} -> {after}")
        case "cover":
            print("\n".join(cover(read(args.matrix))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
