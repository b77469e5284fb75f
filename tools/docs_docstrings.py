"""Extension of griffe that turns our docstrings into Google style for mkdocstrings.

A small class may describe each field by a comment behind it; the comments become the `Attributes:`
of its docstring.

A configuration's docstring is in Hugging Face's form. It has its arguments in groups
(`> Weight sync`) below one `Args:`, with types and defaults in words, and names other classes as
[`~trl.GRPOConfig`]. Google style needs an `Args:` in each group and takes types and defaults from
the code, and links need targets.
"""

import re
from collections.abc import Iterator

import griffe

GROUP = re.compile(r"^> (?P<name>.+)\n\n(?!Args:)(?=    )", re.MULTILINE)
FIRST_GROUP = re.compile(r"^> (?P<name>.+)$", re.MULTILINE)
COMMENT = re.compile(r"  # (?P<text>.+)$", re.MULTILINE)
REFERENCE = re.compile(r"\[`~?(?P<path>[A-Za-z_.]+)`\](?![\[(])")

OURS = {
    "QuRLGRPOConfig": "trl_qurl.QuRLGRPOConfig",
    "QuRLGRPOTrainer": "trl_qurl.QuRLGRPOTrainer",
    "QuRLPPOConfig": "trl_qurl.QuRLPPOConfig",
    "QuRLPPOTrainer": "trl_qurl.QuRLPPOTrainer",
    "QuRLRLOOConfig": "trl_qurl.QuRLRLOOConfig",
    "QuRLRLOOTrainer": "trl_qurl.QuRLRLOOTrainer",
    "QuantizedRolloutsConfig": "trl_qurl.config.rollout.QuantizedRolloutsConfig",
}
"""Names that docstrings refer to, and where they are in the reference."""


class HuggingFaceDocstrings(griffe.Extension):
    """Rewrites docstrings as they are collected."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: object) -> None:
        """Add the fields that comments describe."""
        described = [f"    {name}: {comment}." for name, comment in commented_fields(cls)]
        if cls.docstring and described and "Attributes:" not in cls.docstring.value:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(described)

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = rewritten(obj.docstring.value)


def commented_fields(cls: griffe.Class) -> Iterator[tuple[str, str]]:
    """The fields of a class that have a comment behind them, and this comment, capitalized."""
    for name, member in cls.members.items():
        if not member.is_attribute:
            continue
        comment = COMMENT.search(member.source)
        if comment:
            text = comment["text"]
            yield name, text[0].upper() + text[1:]


def rewritten(docstring: str) -> str:
    """A docstring with an `Args:` for each group, and links."""
    docstring = GROUP.sub(r"**\g<name>**\n\nArgs:\n", docstring)
    docstring = FIRST_GROUP.sub(r"**\g<name>**", docstring)
    return REFERENCE.sub(_link, docstring)


def _link(reference: re.Match[str]) -> str:
    path = reference["path"]
    if path in OURS:
        return f"[`{path}`][{OURS[path]}]"
    return f"`{path}`"
