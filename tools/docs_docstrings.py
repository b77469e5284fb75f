"""Extension of griffe that turns Hugging Face's form of docstrings into Google style for mkdocstrings.

A configuration's docstring has its arguments in groups (`> Weight sync`) below one `Args:`, with types and defaults in
words, and names other classes as [`~trl.GRPOConfig`]. Google style needs an `Args:` in each group and takes types and
defaults from the code, and links need targets.
"""

import re
from typing import Any

import griffe

GROUP = re.compile(r"^> (?P<name>.+)\n\n(?!Args:)(?=    )", re.MULTILINE)
FIRST_GROUP = re.compile(r"^> (?P<name>.+)$", re.MULTILINE)
TYPE_IN_WORDS = re.compile(r"^(?P<name> +\w+) \([^()\n]*\*optional\*[^()\n]*\):", re.MULTILINE)
REFERENCE = re.compile(r"\[`~?(?P<path>[A-Za-z_.]+)`\](?![\[(])")

OURS = {
    "DynamicSamplingSettings": "trl_qurl.config.dynamic_sampling.DynamicSamplingSettings",
    "QuRLGRPOConfig": "trl_qurl.QuRLGRPOConfig",
    "QuRLGRPOTrainer": "trl_qurl.QuRLGRPOTrainer",
    "QuRLPPOConfig": "trl_qurl.QuRLPPOConfig",
    "QuRLPPOTrainer": "trl_qurl.QuRLPPOTrainer",
    "QuantizedRolloutsConfig": "trl_qurl.config.rollout.QuantizedRolloutsConfig",
}
"""Names that docstrings refer to, and where they are in the reference."""


class HuggingFaceDocstrings(griffe.Extension):
    """Rewrites docstrings as they are collected."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(docstring: str) -> str:
    """A docstring with an `Args:` for each group, and links."""
    docstring = GROUP.sub(r"**\g<name>**\n\nArgs:\n", docstring)
    docstring = FIRST_GROUP.sub(r"**\g<name>**", docstring)
    docstring = TYPE_IN_WORDS.sub(r"\g<name>:", docstring)
    return REFERENCE.sub(_link, docstring)


def _link(reference: re.Match[str]) -> str:
    path = reference["path"]
    return f"[`{path}`][{OURS[path]}]" if path in OURS else f"`{path}`"
