"""Write the tables of settings in docs/ from the docstrings of the configurations.

    python tools/docs_settings.py

A table stands between the comments `<!-- settings: CONFIG ... -->` and `<!-- end of settings -->`.
It has one row for each field that the docstrings of these configurations describe.
"""

import dataclasses
import inspect
import re
from pathlib import Path

from trl_qurl.config import ppo, rloo
from trl_qurl.config.help import ENTRY

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(<!-- settings: ([\w ]+) -->\n).*?(<!-- end of settings -->)", re.DOTALL)
SEE = {
    "rollout_quantization": "choosing.md#format",
    "quantization_ignore": "choosing.md#layers-in-other-formats",
    "uaq_scale": "choosing.md#uaqs-s-and-the-learning-rate",
    "smooth_activations": "mismatch.md#large-activations",
    "round_base": "choosing.md#a-rounded-base",
    "sync_check_interval": "reliability.md#how-a-sync-is-checked",
    "objective": "settings.md#objectives",
    "dynamic_sampling": "settings.md#dynamic-sampling-dapo",
    "mismatch_guard": "settings.md#the-mismatch-guard",
}
"""Where a setting is explained."""

CONFIGS = vars(ppo) | vars(rloo)
"""The configurations, by name."""


def with_tables(page: str) -> str:
    """Return a page with all its tables of settings rewritten."""
    return TABLE.sub(lambda found: found[1] + table(found[2].split()) + found[3], page)


def table(names: list[str]) -> str:
    """Return the table of the fields that the docstrings of these configurations describe."""
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for name in names:
        config_class = CONFIGS[name]
        fields = {field.name: field for field in dataclasses.fields(config_class)}
        for entry in ENTRY.finditer(inspect.getdoc(config_class) or ""):
            field = fields.get(entry["name"])
            if field is not None:
                text = meaning(field.name, entry["text"])
                lines.append(f"| `{field.name}` | `{default(field)}` | {text} |")
    return "".join(f"{line}\n" for line in lines)


def default(field: "dataclasses.Field") -> str:
    """Return a field's default as Python code, with the quotes of the documentation."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    return repr(value).replace("'", '"')


def meaning(name: str, text: str) -> str:
    """Return a docstring's entry as Markdown for a cell."""
    text = " ".join(text.split())
    text = re.sub(r"\[`~?[\w.]*?(\w+)`\]", r"`\1`", text).replace("|", "\\|")
    if name in SEE:
        text += f" [More]({SEE[name]})."
    return text


def main() -> None:
    """Write all pages."""
    for path in sorted((ROOT / "docs").glob("*.md")):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
