r"""Single values that need no computer algebra: numbers, words, digits in a base, and the units behind them.

A unit says nothing beside a value without one (`5 \text{ cm}` is 5); two known units must be the same, and nothing is
converted. A percent sign is a unit or a hundredth: 50% is 50, and it is 0.5. Decimals are exact: 0.33 is not 1/3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

_NAMES_OF_UNITS = {
    "%": "percent",
    "degree": "deg",
    "radian": "rad",
    "dollar": "usd buck",
    "cent": "",
    "am": "a.m",
    "pm": "p.m",
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mph": "",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "gal": "gallon",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "day": "",
    "week": "",
    "month": "",
    "yr": "year",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram",
    "oz": "ounce",
    "lb": "pound",
}
_UNITS = {
    alias: unit
    for unit, names in _NAMES_OF_UNITS.items()
    for name in [unit, *names.split()]
    for alias in (name, f"{name}s")
}
_NUMBER_WORDS = [
    *["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
    *["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"],
]
_LARGEST_EXPONENT = 1000

_DIGITS = r"(?:\d+(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(rf"([+-]?) ?({_DIGITS})")
_ARGUMENT = rf"\{{ ?([+-]? ?(?:{_DIGITS})) ?\}}"
_FRACTION = re.compile(rf"([+-]?) ?(?:\\frac ?{_ARGUMENT} ?{_ARGUMENT}|({_DIGITS}) ?/ ?({_DIGITS}))")
_MIXED = re.compile(r"([+-]?) ?(\d+) ?(?:\\frac ?\{(\d+)\} ?\{(\d+)\}|(?<= )(\d+) ?/ ?(\d+))")
_SCIENTIFIC = re.compile(rf"([+-]? ?(?:{_DIGITS})) ?(?:\\cdot 10 ?\^ ?\{{? ?([+-]?\d+) ?\}}?|[eE]([+-]?\d+))")
_REPEATING = re.compile(r"([+-]?) ?(\d*)\.(\d*) ?\\(?:overline|bar|dot) ?\{(\d+)\}")
_BASE = re.compile(
    r"([+-]?) ?\(?((?:\\text\{)?(?=[A-Z]*\d)[0-9A-Z]+\}?)\)? ?_ ?\{? ?\(?(\d+|\\text\{[a-z]+\})\)? ?\}?"
)

_WRAPPING = re.compile(r"\\text\{|\}")
_POWER = r"(?:\^ ?\{?(\d)\}?)?"
_TEXT_BEHIND = re.compile(rf"(.*?\S) ?\\text\{{([^{{}}\d]*)\}} ?{_POWER}")
_DEGREES_BEHIND = re.compile(r"((?!.*\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])).*?\S) ?(\^\\circ|%)()")
# Behind a plain number also unmarked words are a unit; in `3 abc` they may be a product.
_WORDS_BEHIND = re.compile(
    rf"([+-]?(?:{_DIGITS})(?: ?/ ?\d+)?|[^a-zA-Z]*\\frac\{{\d+\}}\{{\d+\}}) ?([a-zA-Z][a-zA-Z. ]*){_POWER}"
)
_POWER_WORDS = re.compile(r"\b(?:square|cubic|sq|cu)\b\.?")
_POWERS = {"s": "2", "c": "3"}  # square, cubic
_TEXT_BEFORE = re.compile(r"^\\text\{[^{}]*(?::|\bis) ?\} ?(.+)")
_TEXT = re.compile(r"\\text\{ ?\(?([^{}]*?)\)? ?\}")
_WORDS = re.compile(r"[a-zA-Z][a-zA-Z .'-]*(?:\d+)?")
_LONG_WORD = re.compile(r"[a-zA-Z]{4}")


class Unit(NamedTuple):
    """Name and power of a unit, each empty if it is not known."""

    name: str
    power: str


NO_UNIT = Unit("", "")
PERCENT = Unit("%", "")


@dataclass(frozen=True)
class Reading:
    """A value taken apart: its text without the unit, that unit, and what it is if it is a number or a word."""

    text: str
    unit: Unit = NO_UNIT
    number: Fraction | None = None
    word: str = ""
    is_marked_word: bool = False


@lru_cache(maxsize=4096)
def read(text: str) -> Reading:
    """Take a value apart."""
    text, unit = _without_unit(_TEXT_BEFORE.sub(r"\1", text))
    number = parse_number(text)
    marked = _TEXT.fullmatch(text)
    bare = _WORDS.fullmatch(text)
    word = " ".join((marked[1] if marked else text if bare else "").rstrip(". ").split())
    if number is None and word.lower() in _NUMBER_WORDS:
        number = Fraction(_NUMBER_WORDS.index(word.lower()))
    return Reading(text, unit, number, word, bool(marked) or bool(bare and _LONG_WORD.search(text)))


def units_agree(given: Unit, expected: Unit) -> bool:
    """Whether the units are the same, as far as both are there and known."""
    return all(one == other or not (one and other) for one, other in zip(given, expected, strict=True))


def decided(given: Reading, expected: Reading) -> bool | None:
    """Whether two values without their units are equal; `None` if that takes algebra."""
    if given.text == expected.text:
        return True
    if given.number is not None and expected.number is not None:
        return given.number == expected.number
    if given.word and expected.word:
        if given.is_marked_word or expected.is_marked_word:
            return given.word.casefold() == expected.word.casefold()
    elif given.is_marked_word or expected.is_marked_word:
        return False
    based = _BASE.fullmatch(given.text), _BASE.fullmatch(expected.text)
    if any(based):
        return _same_digits(given.text, expected.text)
    return None


def parse_number(text: str) -> Fraction | None:
    r"""The number that a text spells out: `-3.50`, `1,000`, `\frac{1}{2}`, `2 1/3`, `3\cdot 10^{5}`, `.\bar{3}`."""
    try:
        if match := _NUMBER.fullmatch(text):
            return _signed(match[1], _decimal(match[2]))
        if (match := _MIXED.fullmatch(text)) and (part := _proper_fraction(*match.groups()[2:])):
            return _signed(match[1], int(match[2]) + part)
        if match := _FRACTION.fullmatch(text):
            return _signed(match[1], _decimal(match[2] or match[4]) / _decimal(match[3] or match[5]))
        if match := _SCIENTIFIC.fullmatch(text):
            exponent = int(match[2] or match[3])
            return _decimal(match[1]) * Fraction(10) ** exponent if abs(exponent) <= _LARGEST_EXPONENT else None
        if match := _REPEATING.fullmatch(text):
            return _signed(match[1], _repeating(match[2], match[3], match[4]))
    except ZeroDivisionError:
        pass
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


def _proper_fraction(*parts: str | None) -> Fraction | None:
    """The fraction of a mixed number; `None` where 3 5/2 and 1 000/3 have none."""
    over, under = [part for part in parts if part is not None]
    return Fraction(int(over), int(under)) if 0 < int(over) < int(under) else None


def _signed(sign: str, number: Fraction) -> Fraction:
    return -number if sign == "-" else number


def _repeating(whole: str, fixed: str, period: str) -> Fraction:
    """0.1666... = (16 - 1) / 90."""
    both = int(f"{whole}{fixed}{period}") - int(f"{whole}{fixed}" or 0)
    return Fraction(both, (10 ** len(period) - 1) * 10 ** len(fixed))


def _same_digits(given: str, expected: str) -> bool:
    """Of numbers in a base: the same digits, and the same base where both name one."""
    (digits, base), (expected_digits, expected_base) = _digits_and_base(given), _digits_and_base(expected)
    return digits == expected_digits and (base == expected_base or not (base and expected_base))


def _digits_and_base(text: str) -> tuple[str, str]:
    match = _BASE.fullmatch(text)
    if not match:
        return text.replace(",", "").replace(" ", ""), ""
    digits, base = (_WRAPPING.sub("", part) for part in match.group(2, 3))
    return match[1] + digits.lstrip("0"), str(_NUMBER_WORDS.index(base)) if base in _NUMBER_WORDS else base


def _without_unit(text: str) -> tuple[str, Unit]:
    unit = NO_UNIT
    for pattern in (_TEXT_BEHIND, _WORDS_BEHIND, _DEGREES_BEHIND, _TEXT_BEHIND):
        match = pattern.fullmatch(text)
        if not match or (pattern is _WORDS_BEHIND and not _is_unit(text, match[2])):
            continue
        text, name = match[1], _canonical(match[2])
        if name:
            word = _POWER_WORDS.search(match[2].lower())
            unit = Unit(name, match[3] or (_POWERS[word[0][0]] if word else ""))
    return text, unit


def _is_unit(text: str, words: str) -> bool:
    """Known, or long enough not to be a product; one letter stands apart, as in `5 m` and not in `5m`."""
    is_apart = f" {words}" in text
    if _canonical(words):
        return len(words) > 1 or is_apart
    first, *_ = [*_POWER_WORDS.sub(" ", words).split(), ""]
    return len(first) >= 4 and is_apart


def _canonical(unit: str) -> str:
    """Empty for what is no known unit: apples, or the right triangles that were counted."""
    if unit == r"^\circ":
        return "degree"
    return _UNITS.get(_POWER_WORDS.sub(" ", unit.lower()).strip(" .~"), "")
