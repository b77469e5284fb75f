r"""What a reference answer is, and which completions are right.

A reference is one of three kinds, in this order:

1. a number, with or without a currency or a unit: TRL's reward compares the number, and units are
   ignored;
2. a text: a word, a single letter, or a code such as B12, a date or a time, compared as text;
3. a formula: TRL's reward compares it with math-verify.

To math-verify a word is a product of letters, so `\boxed{Siarp}` would be right for Paris. It also
reads only some ways to write a number. `tests/grading_pairs.py` shows what is right and what is
wrong.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from typing import Any

BOX = re.compile(r"\\boxed\s*\{")
BRACE = re.compile(r"(?<!\\)[{}]")
STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox)\s*\{([^{}]*)\}")
SUPERSCRIPT = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
PUNCTUATION = str.maketrans("\N{FRACTION SLASH}\N{MINUS SIGN}\N{EN DASH}‘’′“”", "/--'''\"\"")
LOOKS = {
    STYLED.pattern: r"\1",
    r"\\[dt]?frac\s?(?:\{(\d+)\}\s?\{(\d+)\}|(\d)(\d))": r" \1\3/\2\4",
    r"\\?\$|\\!": "",
    r"\{,\}": ",",
    r"\\%": "%",
    r"\^\{?\\circ\}?|\\degree\b": "°",
    r"\\[ ,:;]|~|\\q?quad\b": " ",
}
"""What sets only the looks of an answer in TeX."""
OPTIONAL = {
    r"_?\{?(\d+)\}?": r"\1",  # H_2O
    r"(?<![^\W_])([^\W\d_])\.": r"\1",  # a.m., U.S.
    r"(?<=\d) (?=[ap]m\b)": "",
    r" ?([:/-]) ?": r"\1",
}
"""What may be in a text, or not."""

SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s?(?:[€£¥₹]|Rs\.?|USD|EUR|GBP)?\s?
    (?:
        (?:(?P<whole>\d{{1,99}})\s)?(?P<top>\d{{1,99}})\s?/\s?(?P<bottom>\d{{1,99}})
        | (?P<digits>
            \d{{1,3}}(?P<comma>[,\s])\d{{3}}(?:(?P=comma)\d{{3}})*(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)
          (?:e(?P<power>[-+]?\d{{1,2}}))?
    )
    (?:\s(?P<scale>{"|".join(SCALES)})s?\b)?
    (?P<percent>\s?(?:%|percent\b))?""",
    re.VERBOSE | re.IGNORECASE,
)
FUNCTIONS = "sin|cos|tan|log|ln|exp|sqrt|pi|mod|and|or"  # words of formulas
MONTHS = (
    "january|february|march|april|may|june|july|august|september|october|november|december"
    "|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec"
)
# These change what the number before them means: 9 pm, 30 October, 3 plus x, 5 of hearts.
NO_UNITS = re.compile(
    rf"{FUNCTIONS}|{MONTHS}|am|pm|bce?|ad|ce|of|out|to|plus|minus|over|squared|cubed|factorial|hundred|dozen|half",
    re.IGNORECASE,
)
LETTER_UNITS = "mgshlLNJWVKCF"  # 2 x is a formula
# Without a space, only these are units: 2xy is a formula.
SHORT_UNITS = re.compile(
    "km|cm|mm|nm|kg|mg|ml|mL|ft|lbs?|oz|mph|min|hrs?|Hz|kHz|MHz|GHz|kB|MB|GB|TB|kW|kWh|st|nd|rd|th"
)

WORD = re.compile(r"(?<![^\W_])[^\W\d_]{2,}")  # not 2xy
SYMBOLS = re.compile(r"[\\=^_+*<>{}|]")  # of formulas
LETTER = re.compile(r"\(?[^\W\d_]\)?")
CODE = re.compile(
    rf"""(?!\d*(?:{FUNCTIONS}))[^\W_]*[^\W\d_]\d[^\W_]*  # B12, R2D2, 3F2A
    | \d+([-/.:])\d+(?:\1\d+)+  # a date, a time with seconds, a version
    | \d{{1,2}}:\d\d(?:\s?[ap]\.?m\.?)?
    | \d+-\d+  # a range or a score
    | (?:\+\d|\(\d+\))[\d\s()-]{{6,}}  # a telephone number
    """,
    re.VERBOSE | re.IGNORECASE,
)
VARIABLES = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{1,2}$")  # at the end of a formula


def as_solution(answer: str) -> str:
    r"""Return the final answer of a text, in the last `\boxed{}` or after `####`.

    It is `$18$` for a number, `$\text{Paris}$` for a text, `$x + 1$` for a formula. A solution
    stays as it is.
    """
    boxes = _split_at_boxes(answer)[1::2]
    final = boxes[-1] if boxes else answer.rpartition("####")[2]
    plain = _plain(final)
    if _as_number(plain) is None and _is_worded(plain):
        return f"$\\text{{{plain}}}$"
    return f"${_as_formula(final)}$"


def is_text(solution: str) -> bool:
    """Return whether a solution is compared as text alone."""
    return re.fullmatch(r"\$\\text\{[^{}]*\}\$", solution) is not None


def accuracy_reward(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    r"""Reward function: 1 if the `\boxed{}` of a completion holds the solution, else 0.

    Numbers and formulas are compared by TRL's `accuracy_reward`, which gets all arguments and reads
    boxes that are close to each other as a list. If the solution is a text, every box must hold it.

    Args:
        completions: Conversations; the first message is graded.
        solution: Answers as in the data, or from `as_solution`.
        kwargs: Further arguments of a reward function in TRL.
    """
    from trl.rewards import accuracy_reward as compare

    solutions = [as_solution(text) for text in solution]
    split = [_split_at_boxes(turns[0]["content"]) for turns in completions]
    texts = [_readable(parts) for parts in split]
    references = [f"${_for_trl(right[1:-1])}$" for right in solutions]
    grades = [compare([[{"content": text}] for text in texts], references, **kwargs)]
    if any("\\%" in text for text in (*texts, *references)):  # to TRL, 12.5% is only 0.125
        texts = [text.replace("\\%", "") for text in texts]
        references = [right.replace("\\%", "") for right in references]
        grades.append(compare([[{"content": text}] for text in texts], references))
    rewards = []
    for parts, right, *grade in zip(split, solutions, *grades, strict=True):
        boxes = parts[1::2]
        form = _as_words if is_text(right) else _as_formula  # TRL cannot read all formulas
        is_same = {form(box) for box in boxes} == {form(right)}
        is_equal = 1.0 in grade and bool(boxes) and not is_text(right)
        rewards.append(float(is_same or is_equal))
    return rewards


def _readable(parts: list[str]) -> str:
    """Return a completion with boxes that TRL can read."""
    readable = list(parts)
    readable[1::2] = [f"\\boxed{{{_for_trl(_as_formula(box))}}}" for box in parts[1::2]]
    return "".join(readable)


def _for_trl(formula: str) -> str:
    """Keep TRL from dropping primes, and variables that it takes for units.

    To TRL, `3t` would equal 3.
    """
    formula = formula.replace("'", "^{\\prime}")
    # TRL does not read this TeX in a box.
    formula = re.sub(r"\\sqrt\s?(\d)", r"\\sqrt{\1}", formula)
    *before, last = re.split(r"[\d}]", formula)
    has_unit = bool(before) and _is_unit(last)
    if VARIABLES.search(formula) and not has_unit:
        return f"{{{formula}}}"  # between braces it drops none
    return formula


def _split_at_boxes(text: str) -> list[str]:
    r"""Return the texts outside and inside each `\boxed{}`, in turn; the last one is outside."""
    first, *rest = BOX.split(text)
    parts = [first]
    for chunk in rest:
        depth = 1
        for brace in BRACE.finditer(chunk):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                parts += [chunk[: brace.start()], chunk[brace.end() :]]
                break
        else:  # it is never closed, or around another box
            parts[-1] += chunk
    return parts


def _as_formula(text: str) -> str:
    """Return a number in digits that TRL reads, and another answer nearly as it is."""
    plain = _plain(text)
    number = _as_number(plain)
    if number is not None:
        return number
    formula = _without_unicode(text).strip(" $").removesuffix(".")
    return plain if STYLED.fullmatch(formula) else formula


def _as_number(plain: str) -> str | None:
    r"""Return `-12500`, `0.5`, `50\%` or `\frac{3}{2}` for a number as people write it."""
    match = NUMBER.match(plain)
    if match is None or not _is_unit(plain[match.end() :]):
        return None
    exponent = SCALES.get(str(match["scale"]).lower(), 0)
    if match["bottom"]:
        top = int(match["top"]) + int(match["whole"] or 0) * int(match["bottom"])
        number = f"\\frac{{{top * 10**exponent}}}{{{match['bottom']}}}"
    else:
        digits = re.sub(r"[,\s]", "", match["digits"])
        exponent += int(match["power"] or 0)
        number = format(Decimal(f"{digits}e{exponent}"), "f")
    sign = match["sign"].replace("+", "")
    percent = "\\%" if match["percent"] else ""
    return f"{sign}{number}{percent}"


def _is_unit(text: str) -> bool:
    """Return whether a text after a number is a unit, or nothing: ` legs`, `km/h`, `°C`, ` m^2`."""
    text = re.sub(r"(?<=[^\W\d_])\^?\{?[23]\}?$", "", text)
    if not text:
        return True
    if re.search(r"[\d\\=+*<>^]", text):
        return False
    if text.lstrip()[0] in "€£¥₹°(":
        return True
    word = re.split(r"[\W\d_]", text.lstrip().replace(".", ""))[0]
    if not text.startswith(" "):
        return SHORT_UNITS.fullmatch(word) is not None
    if len(word) == 1:
        return word in LETTER_UNITS
    return word != "" and NO_UNITS.fullmatch(word) is None


def _is_worded(plain: str) -> bool:
    """Return whether an answer that is no number is a text.

    A text is a code, a letter, or words without signs of a formula.
    """
    if CODE.fullmatch(plain) or LETTER.fullmatch(plain):
        return True
    words = WORD.findall(plain.replace(".", ""))
    has_words = any(not re.fullmatch(FUNCTIONS, word) for word in words)
    return has_words and SYMBOLS.search(plain) is None


def _plain(text: str) -> str:
    """Return an answer without what sets only its looks in TeX and Unicode."""
    text = " ".join(_replaced(_without_unicode(text), LOOKS).split())
    if text[:1] in ("'", '"'):  # a quotation, or a number that a spreadsheet keeps as text
        text = text[1:].removesuffix(text[0])
    return re.sub(r"(?<!\.)[.,;]$", "", text).strip()


def _without_unicode(text: str) -> str:
    """Write 5² as 5^{2} and 1½ as 1 1/2, with ASCII's minus sign, quotation marks and spaces."""
    text = SUPERSCRIPT.sub(r"^{\g<0>}", text)
    text = VULGAR_FRACTION.sub(r" \g<0>", text)
    text = unicodedata.normalize("NFKC", text).translate(PUNCTUATION)
    return " ".join(text.split())


def _as_words(text: str) -> str:
    """Return a text without case, and without punctuation that is around it or optional."""
    bare = _replaced(_plain(text).casefold(), OPTIONAL).strip(" .,;:!?'\"")
    inside = bare.strip("()")
    return bare if "(" in inside or ")" in inside else inside


def _replaced(text: str, replacements: dict[str, str]) -> str:
    for pattern, replacement in replacements.items():
        text = re.sub(pattern, replacement, text)
    return text
