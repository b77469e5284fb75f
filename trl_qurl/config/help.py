"""Help on the command line from the docstring of a configuration, so that each setting is described once."""

import dataclasses
import inspect
import re
from types import MappingProxyType
from typing import TypeVar

ENTRY = re.compile(r"^    (?P<name>\w+): (?P<text>.+(?:\n {8}.+)*)", re.MULTILINE)
SENTENCE = re.compile(r"(?<=[^.]\.)\s(?=[A-Z`])")

Config = TypeVar("Config", bound=type)


def with_help(config: Config) -> Config:
    """Give each field the first sentence of its entry in the docstring as help, unless it has its own."""
    known = {field.name: field for field in dataclasses.fields(config)}
    for entry in ENTRY.finditer(inspect.getdoc(config) or ""):
        field = known.get(entry["name"])
        if field is not None and "help" not in field.metadata:
            sentence = SENTENCE.split(" ".join(entry["text"].split()), 1)[0]
            field.metadata = MappingProxyType({**field.metadata, "help": sentence.replace("`", "")})
    return config
