"""`make size`: how large the project is, and what is larger than it should be.

Lines are those of Python files, blank ones and docstrings included. The core is everything in trl_qurl/ outside lab/,
except rewards.py, which grades answers and has a goal of its own.

The core's goal was 7,000 lines, and it had 6,804, before it learned to survive a server, to guard one with a key, and
what GPUs ask for; 7,700 before training learned the engine's forward pass and adapters traveled by themselves; 10,150
before weights were mixed by one coefficient per rollout, sampling settings were checked, a guard watched the mismatch
and activations were smoothed. The lab's was 5,000 before the doctor came, and 6,500 before `trl-qurl mismatch`. 26
settings were the limit before the guard, which needs what to do and from which KL on, and smoothing, which needs how
often. The package had 12 entries before the functions of the importance ratio got a file of their own.
"""

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_qurl"
LONGEST_FILE = 300


def count_lines(path: Path) -> int:
    """The lines of one file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def python_files(folder: Path) -> list[Path]:
    """The Python files of a folder and the folders in it."""
    return sorted(folder.rglob("*.py"))


def total(paths: Iterable[Path]) -> int:
    """The lines of several files."""
    return sum(map(count_lines, paths))


def added_fields() -> list[str]:
    """The settings that our configurations add to TRL's."""
    from trl import GRPOConfig, RLOOConfig

    from trl_qurl import config

    ours = [getattr(config, name) for name in config.__all__ if name.endswith("Config")]
    inherited = {field.name for theirs in (GRPOConfig, RLOOConfig) for field in dataclasses.fields(theirs)}
    return sorted({field.name for cls in ours for field in dataclasses.fields(cls)} - inherited)


def main() -> None:
    """Print one line per figure, with the goal where there is one."""
    lab = python_files(PACKAGE / "lab")
    grading = PACKAGE / "rewards.py"
    core = [path for path in python_files(PACKAGE) if path not in {*lab, grading}]
    long = [path for path in (*core, grading, *lab) if count_lines(path) > LONGEST_FILE]
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    rows = [
        ("core, lines", total(core), 11_050),
        ("lab, lines", total(lab), 7_700),
        ("rewards.py, lines", count_lines(grading), 250),
        ("tests, lines", total(python_files(ROOT / "tests")), None),
        (f"files over {LONGEST_FILE} lines", len(long), 0),
        ("settings added to TRL's", len(added_fields()), 29),
        ("entries in trl_qurl/", len(entries), 13),
    ]
    for name, found, goal in rows:
        limit = "" if goal is None else f"  at most {goal:,}{'' if found <= goal else ', EXCEEDED'}"
        print(f"{name:<24} {found:>7,}{limit}")
    for path in long:
        print(f"  {path.relative_to(ROOT)}: {count_lines(path)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
