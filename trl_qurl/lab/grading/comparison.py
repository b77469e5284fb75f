"""Whether two answers are equal, part by part.

What plain text decides is decided here. A pair of values that takes mathematics goes to the function `algebra`: in the
process that asks, it says that the pair is undecided (`ask_for_algebra`); in the worker it is `algebra.equal`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trl_qurl.lab.grading.structure import Answer, Named, Ordered, Relation, Several, Value, structure
from trl_qurl.lab.grading.values import PERCENT, Reading, decided, read, units_agree

Algebra = Callable[[Value | Relation, Value | Relation], bool]

_LABELLED = re.compile(r"(?:\\text\{ ?)?\(?([A-J])[).:]+ ?\}? ?([\w\\$+-].*)")
_SPACES = re.compile(r"(?<!\d) | (?!\d)")  # but not the one in 5 7, which is not 57
_LETTER = re.compile(r"(?:\\text\{)? ?\(?([A-J])\)?[.)]? ?\}?")


class AlgebraNeededError(Exception):
    """The pair is not decided by its text."""


def ask_for_algebra(given: Value | Relation, expected: Value | Relation) -> bool:
    """The algebra of a process that has none."""
    raise AlgebraNeededError


def equal(given: str, expected: str, algebra: Algebra) -> bool:
    """Whether two normalised answers are equal.

    Args:
        given: of the completion; the letter of a choice may stand before its value.
        expected: the reference.
        algebra: decides pairs of values or relations that are not equal as texts.
    """
    if not given or not expected:
        return False
    if _SPACES.sub("", given) == _SPACES.sub("", expected):
        return True
    labelled = _LABELLED.fullmatch(given)
    if labelled and not _LABELLED.fullmatch(expected):
        given = labelled[1] if _LETTER.fullmatch(expected) else labelled[2]
    return _same(structure(given), structure(expected), algebra)


def _same(given: Answer, expected: Answer, algebra: Algebra) -> bool:
    if isinstance(given, Named) and isinstance(expected, Named):
        return _same_named(given, expected, algebra)
    if isinstance(given, Named) and not isinstance(expected, Relation):
        return _same(given.value, expected, algebra)
    if isinstance(expected, Named) and not isinstance(given, Relation):
        return _same(given, expected.value, algebra)
    if isinstance(given, Several) and isinstance(expected, Several):
        return _same_in_any_order(given.parts, expected.parts, algebra)
    if isinstance(given, Ordered) or isinstance(expected, Ordered):
        return _same_ordered(given, expected, algebra)
    if isinstance(given, Value) and isinstance(expected, Value):
        return _same_value(given, expected, algebra)
    left, right = _as_relation(given), _as_relation(expected)
    return left is not None and right is not None and algebra(left, right)


def _same_named(given: Named, expected: Named, algebra: Algebra) -> bool:
    """The same value of the same name, where a name in words is as good as any; y = 2x is also x = y/2."""
    if given.name == expected.name or (r"\text" in given.name) != (r"\text" in expected.name):
        return _same(given.value, expected.value, algebra)
    left, right = _as_relation(given), _as_relation(expected)
    return left is not None and right is not None and algebra(left, right)


def _as_relation(answer: Answer) -> Relation | None:
    if isinstance(answer, Relation):
        return answer
    if isinstance(answer, Named) and isinstance(answer.value, Value):
        return Relation("=", answer.name, answer.value.text)
    return None


def _same_in_any_order(given: Sequence[Answer], expected: Sequence[Answer], algebra: Algebra) -> bool:
    if len(given) != len(expected):
        return False
    left = list(given)
    for part in expected:
        found = next((index for index, other in enumerate(left) if _same(other, part, algebra)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_ordered(given: Answer, expected: Answer, algebra: Algebra) -> bool:
    if isinstance(given, Ordered) and isinstance(expected, Ordered):
        if _is_vector(given) != _is_vector(expected):
            given, expected = _vector(given), _vector(expected)
        if given.kind == expected.kind and len(given.parts) == len(expected.parts):
            return all(_same(one, other, algebra) for one, other in zip(given.parts, expected.parts, strict=True))
        return False
    if isinstance(given, Several) or isinstance(expected, Several):
        return _same_in_order(_point(given), _point(expected), algebra)
    return _same_ratio(given, expected, algebra)


def _same_in_order(given: Ordered | None, expected: Ordered | None, algebra: Algebra) -> bool:
    return given is not None and expected is not None and _same_ordered(given, expected, algebra)


def _point(answer: Answer) -> Ordered | None:
    """x = 1, y = 2 as (1, 2)."""
    if isinstance(answer, Ordered):
        return answer
    names = [part.name for part in answer.parts if isinstance(part, Named)] if isinstance(answer, Several) else []
    if not isinstance(answer, Several) or len(set(names)) != len(answer.parts):
        return None
    return Ordered("()", tuple(part.value for part in answer.parts if isinstance(part, Named)))


def _is_vector(answer: Ordered) -> bool:
    return answer.kind == "matrix" and all(isinstance(row, Ordered) and len(row.parts) == 1 for row in answer.parts)


def _vector(answer: Ordered) -> Ordered:
    """A column as the point with its entries."""
    if not _is_vector(answer):
        return answer
    return Ordered("()", tuple(row.parts[0] for row in answer.parts if isinstance(row, Ordered)))


def _same_ratio(given: Answer, expected: Answer, algebra: Algebra) -> bool:
    """3:5 is 3/5."""
    one, other = _fraction(given), _fraction(expected)
    return one is not None and other is not None and _same_value(one, other, algebra)


def _fraction(answer: Answer) -> Value | None:
    if isinstance(answer, Value):
        return answer
    if isinstance(answer, Ordered) and answer.kind == ":" and len(answer.parts) == 2:
        over, under = answer.parts
        if isinstance(over, Value) and isinstance(under, Value):
            return Value(rf"\frac{{{over.text}}}{{{under.text}}}")
    return None


def _same_value(given: Value, expected: Value, algebra: Algebra) -> bool:
    one, other = read(given.text), read(expected.text)
    if not units_agree(one.unit, other.unit):
        return False
    verdict = decided(one, other)
    if verdict is None:
        verdict = algebra(Value(one.text), Value(other.text))
    if not verdict and (one.unit == PERCENT) != (other.unit == PERCENT):
        return _same_percentage(one, other, algebra)
    return verdict


def _same_percentage(one: Reading, other: Reading, algebra: Algebra) -> bool:
    """50% is also a half."""
    if one.number is not None and other.number is not None:
        return one.number / (100 if one.unit == PERCENT else 1) == other.number / (100 if other.unit == PERCENT else 1)
    left, right = (f"({side.text})/100" if side.unit == PERCENT else side.text for side in (one, other))
    return algebra(Value(left), Value(right))
