"""What is public, told from the code alone."""

import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import trl_qurl

WITHOUT_ALL = {
    f"trl_qurl.{module}"
    for module in (
        "advantages",
        "lab.data",
        "lab.evaluation.scores",
        "objective",
        "quantization.uaq",
        "rollout.errors",
        "rollout.mismatch",
        "trainers.run_log",
        "trainers.callbacks",
        "lab.runs",
    )
}
"""Public modules without `__all__`: all is public that they define without an underscore."""


def public_names() -> list[tuple[str, str]]:
    """Module and name of everything public, of all packages with `__all__` and of `WITHOUT_ALL`."""
    found = []
    submodules = pkgutil.walk_packages(trl_qurl.__path__, "trl_qurl.")
    for module in ["trl_qurl", *(each.name for each in submodules)]:
        source = Path(importlib.util.find_spec(module).origin).read_text()
        names = []
        if module in WITHOUT_ALL:
            names = re.findall(r"^(?:class|def) (\w+)", source, re.MULTILINE)
        elif "\n__all__ = " in source:
            names = importlib.import_module(module).__all__
        found += [(module, name) for name in names if not name.startswith("_") or "__" in name]
    return found
