r"""What an answer is made of: values in a list, a tuple, an interval, a matrix, a named value, a relation.

A list, a set, a union and the two values of `\pm` are one kind, `Several`, whose order says nothing. `(1, 2)` is one
thing as a point and as an open interval, as only the question knows which. What a single value means is left to
`values` and, where that takes mathematics, to `algebra`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from trl_qurl.lab.grading.notation import ROW_END, closing

MAX_PARTS = 100


@dataclass(frozen=True)
class Value:
    """One number, expression or word, as text."""

    text: str


@dataclass(frozen=True)
class Several:
    """Values in any order."""

    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class Ordered:
    """Values in order; `kind` holds the brackets around them, `:` for a ratio or time, `matrix` for rows of them."""

    kind: str
    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class Named:
    """`x = 5`: a value, and the name that the answer gives it."""

    name: str
    value: Answer


@dataclass(frozen=True)
class Relation:
    r"""An equation or inequality that does not name a value; `sign` is `=`, `<`, `\le` or `\ne`."""

    sign: str
    left: str
    right: str


Answer = Value | Several | Ordered | Named | Relation

# Three digits after each comma, and nothing that continues the number
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_SIGN = re.compile(r"\\(?:le|ge|ne|in)(?![a-zA-Z])|[<>=]")
_SWAPPED = {">": "<", r"\ge": r"\le"}
_NAME = re.compile(
    r"\\text\{[^{}]*\}"
    r"|(?:\\(?:angle|triangle|overline|mathcal)(?![a-zA-Z])\s*)?\{?\s*\|?\\?[a-zA-Z]+'*\|?(?:\s?_(?:\w|\{\w+\}))?\s*\}?"
    r"(?:\^\{-1\})?(?:\s*\(\s*\w+\s*\))?"
    r"|\(\s*[a-zA-Z](?:_\d)?(?:\s*,\s*[a-zA-Z](?:_\d)?)+\s*\)"
)
_SUCH_THAT = re.compile(r"^[a-zA-Z] ?(?:\\in ?\(-\\infty ?,\\infty ?\) ?)?[|:] ?")
_MATRIX = re.compile(r"\\begin\{([pbvVB]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}")
_WRAPPED_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_VARIABLE = re.compile(
    r"(?<![\\a-zA-Z])[a-zA-Z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|phi|psi|omega)(?![a-zA-Z])"
)


@lru_cache(maxsize=4096)
def structure(text: str, inside: bool = False) -> Answer:
    """Read a normalised answer.

    Args:
        text: from `notation.normalized`.
        inside: whether it stands in brackets, where `1,000` is two values.
    """
    text, inside = _unwrapped(text.strip(), inside)
    parts = _split(text, ",;", inside)
    if len(parts) == 1:
        parts = _split(text, r"\cup", inside)
    if len(parts) > 1:
        return _several(structure(part, inside) for part in parts)
    text = _exact_side(text)
    return _relation(text) or _bracketed(text) or _matrix(text) or _plus_minus(text) or _ratio(text) or Value(text)


def _several(parts: Iterable[Answer]) -> Several:
    """A list in a list is one list."""
    nested = (part.parts if isinstance(part, Several) else (part,) for part in parts)
    return Several(tuple(part for several in nested for part in several))


def _unwrapped(text: str, inside: bool) -> tuple[str, bool]:
    r"""Without the braces, the set braces or the `\text{}` around all of it."""
    while True:
        wrapped = _WRAPPED_TEXT.fullmatch(text)
        if wrapped and ("," in wrapped[1] or not re.search("[a-zA-Z]", wrapped[1])):
            text = wrapped[1].strip()
        elif text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1].strip()
        elif text.startswith(r"\{") and text.endswith(r"\}") and closing(text, 1) == len(text) - 1:
            text, inside = _SUCH_THAT.sub("", text[2:-2].strip()), True
        else:
            return text, inside


def _split(text: str, separators: str, inside: bool) -> list[str]:
    r"""The parts between separators outside all brackets; `separators` is some characters, or one command."""
    in_numbers = set() if inside else {i for number in _THOUSANDS.finditer(text) for i in range(*number.span())}
    parts, depth, start, index = [], 0, 0, 0
    while index < len(text):
        depth += (text[index] in "([{") - (text[index] in ")]}")
        if depth < 0:
            return [text]
        width = len(separators) if separators.startswith("\\") else 1
        found = text[index : index + width] == separators if width > 1 else text[index] in separators
        if found and depth == 0 and index not in in_numbers:
            parts.append(text[start:index])
            start = index + width
            index = start
            continue
        index += 1
    parts = [part.strip() for part in [*parts, text[start:]]]
    return [text] if depth or not all(parts) or len(parts) > MAX_PARTS else parts


def _exact_side(text: str) -> str:
    r"""Of `\frac{1}{3} \approx 0.33` what is exact."""
    exact, *_ = _split(text, r"\approx", True)
    return exact


def _relation(text: str) -> Answer | None:
    signs, sides, start = [], [], 0
    for sign in _SIGN.finditer(text):
        before = text[: sign.start()]
        if sum(map(before.count, "([{")) == sum(map(before.count, ")]}")):
            signs.append(sign[0])
            sides.append(text[start : sign.start()].strip())
            start = sign.end()
    sides.append(text[start:].strip())
    if not signs or not sides[-1] or not all(sides[1:]):
        return None
    if set(signs) == {"="}:
        return _equation(sides)
    if signs == [r"\in"]:
        return Named(sides[0], structure(sides[1]))
    return _interval(signs, sides) or (_two_sided(signs[0], *sides) if len(sides) == 2 else None)


def _equation(sides: list[str]) -> Answer:
    first, last = sides[0], sides[-1]
    if len(sides) == 2 and _NAME.fullmatch(last) and not _NAME.fullmatch(first):
        first, last = last, first
    if _NAME.fullmatch(first):
        return Named(first.replace(" ", ""), structure(last))
    # A calculation, as 2 + 3 = 5
    if len(sides) > 2 or not _VARIABLE.search(first + last):
        return structure(last)
    return Relation("=", first, last)


def _two_sided(sign: str, left: str, right: str) -> Relation:
    if sign in _SWAPPED:
        return Relation(_SWAPPED[sign], right, left)
    return Relation(sign, left, right)


def _interval(signs: list[str], sides: list[str]) -> Named | None:
    """`x < 5` and `2 < x < 5` as intervals, if their ends are numbers."""
    names = [index for index, side in enumerate(sides) if _NAME.fullmatch(side)]
    directions = {sign in (">", r"\ge") for sign in signs}
    if len(names) != 1 or len(sides) > 3 or len(directions) != 1 or not {"=", r"\ne", r"\in"}.isdisjoint(signs):
        return None
    if directions == {True}:
        sides, signs = sides[::-1], signs[::-1]
    at = next(index for index, side in enumerate(sides) if _NAME.fullmatch(side))
    if len(sides) == 3 and at != 1 or any(_VARIABLE.search(side) for side in sides[:at] + sides[at + 1 :]):
        return None
    low = structure(sides[at - 1]) if at > 0 else Value(r"-\infty")
    high = structure(sides[at + 1]) if at + 1 < len(sides) else Value(r"\infty")
    left = "[" if at > 0 and signs[at - 1] in (r"\le", r"\ge") else "("
    right = "]" if at < len(signs) and signs[at] in (r"\le", r"\ge") else ")"
    return Named(sides[at].replace(" ", ""), Ordered(left + right, (low, high)))


def _bracketed(text: str) -> Answer | None:
    if text[:1] not in tuple("([") or closing(text, 0) != len(text) - 1:
        return None
    inner = text[1:-1]
    parts = _split(inner, ",;", inside=True)
    if len(parts) > 1:
        return Ordered(text[0] + text[-1], tuple(structure(part) for part in parts))
    return structure(inner) if text[0] + text[-1] in ("()", "[]") and inner.strip() else None


def _matrix(text: str) -> Answer | None:
    matrix = _MATRIX.fullmatch(text)
    if not matrix or matrix[1] in ("vmatrix", "Vmatrix"):  # a determinant, a norm
        return None
    rows = [row for row in matrix[2].split(ROW_END.strip()) if row.strip()]
    cells = [tuple(structure(cell) for cell in row.split("&")) for row in rows]
    return Ordered("matrix", tuple(Ordered("row", row) for row in cells)) if cells else None


def _plus_minus(text: str) -> Answer | None:
    if text.count(r"\pm") != 1:
        return None
    before, after = text.split(r"\pm")
    plus = f"{before}+{after}" if before.strip() else after
    return _several([structure(plus), structure(f"{before}-{after.strip()}")])


def _ratio(text: str) -> Answer | None:
    parts = _split(text, ":", inside=False)
    return Ordered(":", tuple(structure(part) for part in parts)) if len(parts) > 1 else None
