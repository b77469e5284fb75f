r"""The mathematics: whether two expressions or relations are equal, by math-verify and SymPy.

Runs in a worker that is killed when it takes too long (`process`). math-verify's LaTeX parser reads a value; two of
them are compared as exact numbers or, with 60 digits, at a few points. Only what has no numerical value goes to
math-verify's own comparison: that one rounds to six decimals, where 0.0000001 would be 0.0000002.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.grading.notation import ROW_END
from trl_qurl.lab.grading.structure import Relation, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sympy import Expr

DIGITS = 60
"""Decimal digits to which values are worked out."""

AGREEING_DIGITS = 40
"""Decimal digits in which equal values agree; the others are for rounding."""

SMALLEST = 1e-50
"""Below it, a value that is not zero cannot be told from one that is zero but was not simplified."""

POINTS = 4
"""At which expressions with variables are compared."""

LARGEST_POWER = 100_000
"""Binary digits of the largest number that is worked out exactly."""

BITS_OF_A_POINT = 8
"""Binary digits of the variables' values, at least those of their numerators."""

MAX_COMMAS = 10
"""In the arguments of a function; the parser takes time that grows faster than a list."""

_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NO_EXPRESSION = re.compile(r"\\text|[=<>]|\\(?:le|ge|ne|in|approx)(?![a-zA-Z])")
_SUBSCRIPT = re.compile(r"_ ?\{[^{}]*\}")  # the k=1 of a sum
_DECIMAL = re.compile(r"\d*\.\d+|\d+\.")
_MIXED = re.compile(r"(?<![\w.)}^])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}")
_ADJACENT = re.compile(r"(?<=[\d)])(?<![_^]\d) ?(?=\()|(?<=\)) ?(?=\d|\\frac|\\sqrt)")
_LOGARITHM = re.compile(r"\\log(?![a-zA-Z_]| _)")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}) ?\^\\circ")


def equal(given: Value | Relation, expected: Value | Relation) -> bool:
    """Whether two values or relations are equal; whatever the libraries cannot read is not equal to anything."""
    try:
        if isinstance(given, Relation) and isinstance(expected, Relation):
            return given.sign == expected.sign and _same_relation(given, expected)
        if isinstance(given, Value) and isinstance(expected, Value):
            return _same_expression(*map(expression, _same_logarithms(given.text, expected.text)))
    except Exception:  # of many kinds, the depth of recursion and the memory included
        pass
    return False


def _same_logarithms(given: str, expected: str) -> tuple[str, str]:
    r"""Of a pair of which one writes `\ln`, the other's `\log` is natural too; the parser's is to base 10."""
    if r"\ln" in given + expected:
        return _LOGARITHM.sub(r"\\ln", given), _LOGARITHM.sub(r"\\ln", expected)
    return given, expected


def expression(text: str) -> Any:
    """What math-verify's parser makes of a value, with decimals exact, mixed numbers added and `i` imaginary."""
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import I, Symbol

    parsed = latex2sympy(
        _explicit(text),
        is_real=True,
        normalization_config=None,
        conversion_config=ConversionConfig(lowercase_symbols=False),
    )
    return parsed.subs(Symbol("i", real=True), I) if hasattr(parsed, "subs") else parsed


def _explicit(text: str) -> str:
    """LaTeX that leaves the parser nothing to guess: it takes 2(3) for a mixed number, and decimals for floats."""
    text = _THOUSANDS_COMMA.sub("", text)
    if _NO_EXPRESSION.search(_SUBSCRIPT.sub("", text)) or text.count(",") > MAX_COMMAS:
        raise ValueError("Words, relations and lists are no expression.")
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = text.replace(r"^\circ", "").replace(ROW_END, r"\\")
    text = _MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    text = _DECIMAL.sub(_exact_decimal, text)
    return _ADJACENT.sub(r"\\cdot ", text).strip()


def _exact_decimal(match: re.Match[str]) -> str:
    whole, _, decimals = match[0].partition(".")
    fraction = rf"\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}"
    # An exponent needs braces; anywhere else the parser takes them for a set.
    return f"{{{fraction}}}" if match.string[: match.start()].endswith("^") else f"({fraction})"


def _same_expression(given: Any, expected: Any) -> bool:
    from sympy import Expr

    if not (isinstance(given, Expr) and isinstance(expected, Expr)):
        return _verified(given, expected)
    if _is_large(given) or _is_large(expected):
        return bool(given == expected)
    given, expected = given.doit(), expected.doit()
    difference = given - expected
    if difference.is_Rational:
        return bool(difference == 0)
    for one, other in _at_points(given, expected):
        if one is None or other is None:
            return _verified(given, expected)
        if not _close(one, other):
            return False
    return True


def _verified(given: Any, expected: Any) -> bool:
    from math_verify import verify

    return bool(verify([expected], [given], timeout_seconds=None))


def _same_relation(given: Relation, expected: Relation) -> bool:
    """The sides differ by the same up to a factor, which must not turn an inequality."""
    one, other = (expression(relation.left) - expression(relation.right) for relation in (given, expected))
    if _is_large(one) or _is_large(other):
        return bool(one == other)
    factor: Any = None
    for first, second in _at_points(one, other):
        if not first or not second or (factor is not None and not _close(first / second, factor)):
            return False
        factor = first / second
    return given.sign in ("=", r"\ne") or bool(factor.is_positive)


def _is_large(value: Expr) -> bool:
    """Whether working the expression out would take numbers too large to be anyone's answer. Innermost parts first."""
    from sympy import Pow, factorial, log, postorder_traversal

    for part in postorder_traversal(value):
        if isinstance(part, Pow) and part.exp.is_number and part.base != 0:
            size = abs(part.exp.evalf(5) * (log(abs(part.base)).evalf(5) if part.base.is_number else BITS_OF_A_POINT))
        elif isinstance(part, factorial) and part.is_number:
            size = abs(part.args[0].evalf(5))
        else:
            continue
        if not size.is_finite or size > LARGEST_POWER:
            return True
    return False


def _at_points(one: Expr, other: Expr) -> Iterator[tuple[Any, Any]]:
    """Both expressions at the same points, positive and negative; `None` where one has no value."""
    from sympy import Rational, prime

    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    for point in range(POINTS if symbols else 1):
        places = {
            symbol: Rational((-1) ** (point * (index + 1) // 2) * prime(10 + 3 * index + 5 * point), prime(7 + index))
            for index, symbol in enumerate(symbols)
        }
        yield _number(one, places), _number(other, places)


def _number(value: Expr, places: dict[Any, Any]) -> Any:
    number = value.subs(places).evalf(DIGITS)
    return number if number.is_number and number.is_finite else None


def _close(one: Any, other: Any) -> bool:
    return bool(abs(one - other) <= max(SMALLEST, abs(one), abs(other)) * 10**-AGREEING_DIGITS)
