"""Set the account that hosts the repository in every file that contains its address.

    python tools/owner.py NAME

`url` of setup.cfg holds the present account. Until there is a real one, it is OWNER.
"""

import argparse
import configparser
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = re.compile(r"(?:github\.com|/github)/([\w-]+)/trl-qurl\b")
"""The repository's address, as GitHub and Colab write it."""


def present_owner(root: Path) -> str:
    """Return the account in setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    return ADDRESS.search(setup["metadata"]["url"])[1]


def tracked_texts(root: Path) -> list[Path]:
    """Return the files of a clone that hold text."""
    command = ["git", "grep", "--cached", "-I", "--name-only", "-e", ""]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return [root / name for name in listed.stdout.splitlines()]


def other_owners(files: Iterable[Path], owner: str) -> list[str]:
    """Return where a file names another account in the repository's address, or OWNER."""
    places = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            owners = {*ADDRESS.findall(line), *re.findall(r"`(OWNER)`", line)}
            if owners - {owner}:
                places.append(f"{path.name}:{number}")
    return places


def set_owner(files: Iterable[Path], old: str, new: str) -> list[Path]:
    """Replace the account in files, and return the changed ones."""
    changed = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        renamed = text.replace(f"{old}/trl-qurl", f"{new}/trl-qurl").replace(f"`{old}`", f"`{new}`")
        if renamed != text:
            path.write_text(renamed, encoding="utf-8")
            changed.append(path)
    return changed


def main() -> None:
    """Set the account that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", metavar="NAME", help="account or organization on GitHub")
    name = parser.parse_args().name
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", name):
        parser.error(f"{name} is not the name of an account.")
    files = tracked_texts(ROOT)
    for path in set_owner(files, present_owner(ROOT), name):
        print(path.relative_to(ROOT))
    places = other_owners(files, name)
    if places:
        parser.exit(1, f"Another account is left in {', '.join(places)}.\n")


if __name__ == "__main__":
    main()
