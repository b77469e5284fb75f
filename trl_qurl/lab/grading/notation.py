r"""One spelling for each sign, so that the rest of the package meets no variants.

`\dfrac12`, `½`, `\left(`, `\,` and full-width digits are all gone afterwards; dollar signs and formatting leave no
trace. Nothing here knows what an answer means: lists, units and numbers are read in `structure` and `values`. Every
pattern is applied to a short text (`MAX_LENGTH` bounds it before), so that none needs to be linear.
"""

from __future__ import annotations

import re
import unicodedata

MAX_LENGTH = 1000
MAX_NESTING = 15

ROW_END = r"\cr "
"""TeX's own name for the `\\\\` between the rows of a matrix: one that no other rule mistakes for a space."""

_SIGNS = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "⋅": r"\cdot ",
    "·": r"\cdot ",
    "÷": "/",
    "±": r"\pm ",
    "√": r"\sqrt ",
    "∞": r"\infty ",
    "π": r"\pi ",
    "θ": r"\theta ",
    "°": r"^\circ ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "∪": r"\cup ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "、": ",",
    "。": ".",
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "€": "",
    "£": "",
    "¥": "",
    "\u2009": r"\,",
    "\u202f": r"\,",
}
_UNICODE = str.maketrans(_SIGNS)
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")

_FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|gcd|lcm|max|min"

_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?", ""),
        # Fonts say nothing; what stands in an upright one may be a word.
        (r"\\mathbb\s*\{?\s*R\s*\}?|\\(?:R|reals)(?![a-zA-Z])|(?i:all real numbers)", r"(-\\infty,\\infty)"),
        (r"\\(?:math(?:rm|bf|it|sf|tt)|text(?:bf|it|rm|sf|tt|normal)|[mhf]box|operatorname|emph)\*?\s*\{", r"\\text{"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\(?:displaystyle|textstyle|boldsymbol|bm|rm|bf|it|limits|quad|qquad)(?![a-zA-Z])", " "),
        # A comma or a thin space inside a number
        (r"(?<=\d)\s*(?:,\s*\\!|\{\s*,\s*\}|\\[,!;: ]|~)\s*(?=\d{3}(?!\d))", ""),
        (r"\\!", ""),
        (r"\\[,;:> ]|~", " "),
        (r"\\?\$", ""),
        (r"\\([%&_#])", r"\1"),
        # Signs with several names
        (r"\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?|\\degrees?(?![a-zA-Z])", r"^\\circ "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])|\\lparen(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])|\\rparen(?![a-zA-Z])", ")"),
        (r"\\lbrack(?![a-zA-Z])", "["),
        (r"\\rbrack(?![a-zA-Z])", "]"),
        (r"\\(?:[lr]?vert|mid)(?![a-zA-Z])", "|"),
        (r"\\(?:leq?|leqslant)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geq?|geqslant)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\neq?(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\(?:approx|thickapprox|simeq|doteq|sim)(?![a-zA-Z])", r"\\approx "),
        (r"\\(?:varnothing|emptyset)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:ldots|cdots|dots)(?![a-zA-Z])", "..."),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\+/-", r"\\pm "),
        (r"^\s*\*\*(.*)\*\*\s*$", r"\1"),
        (r"\*\*", "^"),
        (r"\\(?:times|cdot|ast)(?![a-zA-Z])|\*", r"\\cdot "),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
        (r"(?<![a-zA-Z\\])(?:infinity|infty|inf)(?![a-zA-Z])|\\text\{\s*infinity\s*\}", r"\\infty "),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (rf"(?<![a-zA-Z\\])({_FUNCTIONS})(?![a-zA-Z])(?=\s*[\d(\\a-z])", r"\\\1 "),
        # What separates values
        (r"\\text\{[\s,;]*(?:and|or|AND|OR|和|或)[\s,;]*\}|\\text\{\s*[,;]\s*\}", " , "),
        (r"\\text\{\s*\}", " "),
        (r"(?<![a-zA-Z\\])(?:and|or|AND|OR)(?![a-zA-Z])", " , "),
        (r"(?<=[^\u4e00-\u9fff\s])\s*[和或]\s*(?=[^\u4e00-\u9fff\s])", " , "),
        (r"[,;](?:\s*[,;])+", " , "),
    ]
]

_CHINESE = r"[\u3000-\u303f\u4e00-\u9fff:]+"
_CHINESE_ENDS = re.compile(rf"^\s*{_CHINESE}\s*(?=[^\u4e00-\u9fff])|(?<=[^\u4e00-\u9fff])\s*{_CHINESE}\s*$")
_LEADING = re.compile(r"^(?:[=,;:\s]|\\approx|\\text\{\s*(?:about|approximately)?\s*\})+")
_TRAILING = re.compile(r"(?:[,;:\s]|(?<!\.)\.)+$")
_COMMANDS_WITH_ARGUMENTS = re.compile(r"\\(frac|binom|sqrt)(?![a-zA-Z])|\^(?=\s*\()")
_ARGUMENT = re.compile(r"\\[a-zA-Z]+|[^\\\s]")
_OPENING, _CLOSING = "([{", ")]}"


def normalized(text: str) -> str:
    """The answer in one spelling; empty if nothing is left of it or it is over the limits."""
    if len(text) > MAX_LENGTH:
        return ""
    text = _SUPERSCRIPTS.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(_UNICODE)).replace("\N{FRACTION SLASH}", "/")
    text = _double_backslashes(re.sub(r"[\x00-\x20\x7f]+", " ", text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _CHINESE_ENDS.sub("", text) or text
    text = _LEADING.sub("", text)
    text = _TRAILING.sub("", text)
    text = re.sub(" +", " ", text)
    if len(text) > MAX_LENGTH or nesting(text) > MAX_NESTING:
        return ""
    return brace_arguments(text).strip()


def nesting(text: str) -> int:
    """How deep the brackets of any kind go."""
    depth = deepest = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        deepest = max(deepest, depth)
    return deepest


def closing(text: str, position: int) -> int:
    """Where the bracket that opens at `position` closes, whatever its kind, as intervals mix them; -1 if nowhere."""
    depth = 0
    for index in range(position, len(text)):
        depth += (text[index] in _OPENING) - (text[index] in _CLOSING)
        if depth == 0:
            return index
    return -1


def brace_arguments(text: str) -> str:
    r"""Braces around every argument of `\frac`, `\binom`, `\sqrt`, and around an exponent in parentheses.

    As TeX reads them: `\frac12` is `\frac{1}{2}`. A text that lacks an argument comes back as it is.
    """
    braces: list[tuple[int, str]] = []
    for command in _COMMANDS_WITH_ARGUMENTS.finditer(text):
        position = command.end()
        if command[1] == "sqrt":
            position = _after_option(text, position)
        for _ in range(2 if command[1] in ("frac", "binom") else 1):
            position = _after_spaces(text, position)
            argument = _ARGUMENT.match(text, position)
            if argument is None:
                return text
            if argument[0] == "{":
                end = closing(text, position) + 1
                if end == 0:
                    return text
            else:
                in_parentheses = argument[0] == "(" and command[1] in ("sqrt", None)
                end = closing(text, position) + 1 if in_parentheses else argument.end()
                if end == 0:
                    return text
                braces += [(position, "{"), (end, "}")]
            position = end
    # From the right, so that the positions before stay; where two meet, the closing one stands first.
    for position, brace in sorted(braces, key=lambda item: (item[0], item[1] == "{"), reverse=True):
        text = text[:position] + brace + text[position:]
    return text


def _double_backslashes(text: str) -> str:
    """Row ends where there are rows; elsewhere a backslash that was escaped once too often."""
    if re.search(r"matrix|array|cases", text):
        return text.replace(r"\\", ROW_END)
    return text.replace(r"\\", "\\")


def _after_spaces(text: str, position: int) -> int:
    while text[position : position + 1] == " ":
        position += 1
    return position


def _after_option(text: str, position: int) -> int:
    """Behind the `[3]` of a third root."""
    start = _after_spaces(text, position)
    return closing(text, start) + 1 or position if text[start : start + 1] == "[" else position
