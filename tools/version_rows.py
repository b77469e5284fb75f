"""What a row of `requirements/versions.toml` installs; nothing is run or written here."""

import re
import tomllib
from typing import NamedTuple

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
