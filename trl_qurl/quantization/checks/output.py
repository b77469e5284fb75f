"""Checks of a directory that a new checkpoint would replace."""

import os
from pathlib import Path


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise `FileExistsError` if `path` holds something other than a quantized checkpoint.

    Raises `ValueError` for a `~`: it would become the name of a directory.
    """
    path = Path(path)
    if path.parts[:1] == ("~",):
        raise ValueError(f"No checkpoint can be written to {path}: write out your home directory.")
    if not path.exists():
        return
    contents = "is a file"
    if path.is_dir():
        names = sorted(os.listdir(path))
        if not names:
            return
        config = path / "config.json"
        if config.is_file() and '"quantization_config"' in config.read_text(encoding="utf-8"):
            return
        contents = f"holds {', '.join(names[:3])}, ..."
    raise FileExistsError(
        f"{path} {contents} and would be replaced, but it is not a quantized checkpoint: choose a "
        "directory that does not exist yet, an empty one, or an earlier quantized checkpoint."
    )
