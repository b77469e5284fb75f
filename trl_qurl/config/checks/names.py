"""What to say of a setting's name that does not exist: where it was and what replaces it."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path

OLD_NAMES = Path(__file__).with_name("old_names.txt")
"""A line for each: where it was, and what to do instead. `docs/from-trl.md` has them as a table."""


def explain(unknown: Iterable[str], known: Collection[str]) -> str:
    """Return a line for each unknown name, with its remedy or a similar name that exists."""
    old = {line.split()[0]: line for line in OLD_NAMES.read_text(encoding="utf-8").splitlines()}
    explained = []
    for name in unknown:
        similar = get_close_matches(name, known, 1)
        guess = f"{name}, did you mean {similar[0]}?" if similar else name
        explained.append(old.get(name, guess))
    return ";\n".join(explained)
