"""What is public, told from the code alone."""

import ast
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import trl_qurl

WITHOUT_ALL = (
    "trl_qurl.advantages",
    "trl_qurl.lab.data",
    "trl_qurl.lab.evaluation.scores",
    "trl_qurl.objective",
    "trl_qurl.quantization.uaq",
    "trl_qurl.rollout.errors",
    "trl_qurl.rollout.mismatch",
    "trl_qurl.trainers.run_log",
    "trl_qurl.trainers.callbacks",
    "trl_qurl.lab.runs",
)
"""Public modules without `__all__`: public there is what they
define without a leading underscore.
"""


def public_names() -> list[tuple[str, str]]:
    """Module and name of everything public, of all packages with `__all__` and of `WITHOUT_ALL`."""
    found = []
    modules = [
        "trl_qurl",
        *(module.name for module in pkgutil.walk_packages(trl_qurl.__path__, "trl_qurl.")),
    ]
    for module in modules:
        source = Path(importlib.util.find_spec(module).origin).read_text()
        if module in WITHOUT_ALL:
            defined = [
                n.name
                for n in ast.parse(source).body
                if isinstance(n, (ast.FunctionDef, ast.ClassDef))
            ]
            found += [(module, name) for name in defined if not name.startswith("_")]
        elif re.search(r"^__all__ = ", source, re.MULTILINE):
            found += [(module, name) for name in importlib.import_module(module).__all__]
    return found
