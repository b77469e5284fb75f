"""Command-line help from the docstrings of configurations: a setting is described only once."""

import dataclasses
import inspect
import re
from types import MappingProxyType
from typing import TypeVar

ENTRY = re.compile(r"^    (?P<name>\w+): (?P<text>.+(?:\n {8}.+)*)", re.MULTILINE)
SENTENCE = re.compile(r"(?<=[^.]\.)\s(?=[A-Z`])")

Config = TypeVar("Config", bound=type)


def with_help(config: Config) -> Config:
    """Set the help of each field without one to the first sentence of its docstring entry."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    for entry in ENTRY.finditer(inspect.getdoc(config) or ""):
        field = fields.get(entry["name"])
        if field is not None and "help" not in field.metadata:
            text = " ".join(entry["text"].split())
            sentence = SENTENCE.split(text, 1)[0].replace("`", "")
            field.metadata = MappingProxyType({**field.metadata, "help": sentence})
    return config
