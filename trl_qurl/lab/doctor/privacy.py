"""Makes text fit to be pasted into a public place: no home directory, no user or host, no value of a secret."""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
from pathlib import Path

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
SHORTEST = 4
"""Shorter names of users and hosts, and shorter secrets, are words that mean other things too."""


def without_private(text: str) -> str:
    """The text with what is private replaced by a name for it."""
    replaced = {value: f"<{name}>" for name, value in os.environ.items() if SECRET.search(name)}
    replaced |= {platform.node(): "<host>"} if platform.node() != "localhost" else {}
    for value, stand_in in replaced.items():
        if len(value) >= SHORTEST:
            text = text.replace(value, stand_in)
    text = text.replace(sys.prefix, "<environment>")
    home = str(Path.home())
    if home != "/":
        text = re.sub(rf"{re.escape(home)}(?=/|\b)", "~", text)
    try:
        return text.replace(f"/{getpass.getuser()}/", "/<user>/")
    except (KeyError, OSError):  # a user without a name, as in some containers
        return text
