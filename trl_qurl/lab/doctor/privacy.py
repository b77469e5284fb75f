"""Redact text for public posts: removes home directories, user and host names, and the values of secrets."""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
from pathlib import Path

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
SHORTEST = 4
"""Minimum length of a host name or secret to replace; shorter ones often are ordinary words."""


def without_private(text: str) -> str:
    """Replace private parts of a text with placeholders."""
    placeholders = {value: f"<{name}>" for name, value in os.environ.items() if SECRET.search(name)}
    placeholders |= {platform.node(): "<host>"} if platform.node() != "localhost" else {}
    for value, placeholder in placeholders.items():
        if len(value) >= SHORTEST:
            text = text.replace(value, placeholder)
    text = text.replace(sys.prefix, "<environment>")
    home = str(Path.home())
    if home != "/":
        text = re.sub(rf"{re.escape(home)}(?=/|\b)", "~", text)
    try:
        return text.replace(f"/{getpass.getuser()}/", "/<user>/")
    except (KeyError, OSError):  # a user without a name, as in some containers
        return text
