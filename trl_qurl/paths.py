"""Whether a model or a data set is on this machine or on the Hub.

Nothing else is imported: commands ask before slow imports.
"""

from pathlib import Path


def is_local(name: str) -> bool:
    """Return whether the name of a model or a data set is a path here, and not one on the Hub.

    Nothing expands `~`, as in transformers: a shell does, unless it is quoted.
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def home_advice(path: str | Path) -> str:
    """Return a sentence for errors about a path that does not exist; "" without a `~`."""
    if not str(path).startswith("~"):
        return ""
    return " Write your home directory out: '~' stands for it only in a shell, unquoted."
