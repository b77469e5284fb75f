r"""What a reference answer is, and which completions are right.

`as_solution` writes references and boxes in one form, and decides what they are:

1. a number, maybe with a unit: it is compared exactly, and the unit is ignored;
2. a text: words, a letter, or a code such as B12, a date or a time;
3. a formula: math-verify compares it, through TRL's reward.

To math-verify a word is a product of letters, so `\boxed{Siarp}` would be right for Paris, and all
numbers below a millionth are equal. `tests/grading.md` shows what is right and what is wrong.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import Any

INSIDE = ""
for _ in range(9):  # braces in braces
    INSIDE = rf"(?:[^{{}}\\]|\\(?!boxed).|\{{{INSIDE}\}})*+"
BOX = re.compile(rf"\\boxed\s*\{{({INSIDE})\}}", re.DOTALL)

SYMBOLS = (
    r"α\alpha |β\beta |γ\gamma |δ\delta |ε\epsilon |ζ\zeta |η\eta |θ\theta |κ\kappa |λ\lambda "
    r"|μ\mu |ν\nu |ξ\xi |π\pi |ρ\rho |σ\sigma |τ\tau |φ\phi |χ\chi |ψ\psi |ω\omega |Γ\Gamma "
    r"|Δ\Delta |Θ\Theta |Λ\Lambda |Ξ\Xi |Π\Pi |Σ\Sigma |Φ\Phi |Ψ\Psi |Ω\Omega |×\times |·\cdot "
    r"|⋅\cdot |÷\div |±\pm |≤\le |≥\ge |≠\ne |≈\approx |∞\infty |∅\emptyset |∪\cup |∩\cap |∈\in "
    "|→\\to |\N{FRACTION SLASH}}{|\N{MINUS SIGN}-|\N{EN DASH}-|‘'|’'|′'|“\"|”\""
)
TO_TEX = {ord(pair[0]): pair[1:] for pair in SYMBOLS.split("|")}
ARGUMENT = r"\s*(\\[A-Za-z]+|[^\s\\{}[])"  # without its braces
LOOKS = {
    "[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+": r"^{\g<0>}",
    "[₀-₉]+": r"_{\g<0>}",
    r"(?<=\d)\N{FRACTION SLASH}(?=\d)": "/",
    "[¼-¾⅐-⅞]": r" \\frac{\g<0>}",  # to NFKC, ½ is 1⁄2, of which SYMBOLS makes 1}{2
    "[ℂℕℚℝℤ]": r"\\mathbb{\g<0>}",
    r"(?:√|(?<![A-Za-z\\])sqrt)\s*(\d+|\w|\([^()]*\))": r"\\sqrt{\1}",
    r"\\?[$€£¥₹]|(?<!\\)\\!|\\(?:left|right|displaystyle)(?![a-z])": "",
    r"(?<!\\)\\[ ,:;]|~|\\q?quad\b": " ",
    r"\\([#&%_])": r"\1",
    r"\{,\}": ",",
    r"\^\s?(?:\\circ|\{\s?\\circ\s?\})|\\degree\b": "°",
    r"\\(?:text\w*|math(?:rm|bf|it|tt|cal)|mbox|boldsymbol|url|ce)\s*\{([^{}]*)\}": r" \1",
    r"\\[dtc](frac|binom)": r"\\\1",
    r"\\varnothing": "∅",
    r"\\rightarrow": "→",
    r"\b(?:infinity|inf)\b": "∞",
    rf"(\\sqrt(?:\[\w+\])?|\\frac|\\binom|\\mathbb){ARGUMENT}": r"\1{\2}",
    rf"(\\(?:frac|binom)\{{{INSIDE}\}}){ARGUMENT}": r"\1{\2}",
    r"(?<=[\d.])\\overline\{(\d+)\}": r"\1" * 8,
    r"\s+": " ",
    " ?/ ?": "/",
    r"^ | $|(?<!\.)[.,;] ?$": "",
    r"^(?=[<>≤≥]|\\[gl]e)": "x ",
    r"^(['\"])(.*?)\1?$": r"\2",  # a quotation, or a number that a spreadsheet keeps as text
}
"""What sets only the looks of an answer."""

SCALES = "thousandth|hundredth|tenth|hundred|thousand|lakh|million|crore|billion|trillion"
POWERS = (-3, -2, -1, 2, 3, 5, 6, 7, 9, 12)
NUMBER = re.compile(
    rf"""(?:(?:Rs\.?|USD|EUR|GBP|INR)\s?)?(?P<sign>[-+]?)\s?
    (?:
        (?P<ratio>(?:\d+\s+)?\d+/0*[1-9]\d*)
        | (?P<digits>(?:\d{{1,3}}(?P<comma>[,'\s_])\d{{3}}(?:(?P=comma)\d{{3}})*
            |\d{{1,2}}(?:,\d\d)+,\d{{3}}|\d+)(?:\.\d*)?|\.\d+)
          (?:e\{{?(?P<power>[-+]?\d{{1,3}})\}}?)?
    )
    (?:\s(?P<scale>{SCALES})s?\b)?(?P<percent>\s?(?:%|percent\b))?""",
    re.VERBOSE | re.IGNORECASE,
)
MEASURES = (
    "meter|metre|inch|foot|feet|yard|mile|acre|gram|ounce|pound|ton|liter|litre|gallon|cup|second|"
    "minute|hour|day|week|month|year|joule|newton|watt|volt|amp|ampere|ohm|kelvin|pascal|mole|"
    "radian|degree|celsius|fahrenheit|dollar|cent|euro|rupee|usd|unit|point|square|cubic|sq|cu"
)
THINGS = (  # the most frequent ones of GSM8K
    "animal|apple|bag|ball|balloon|banana|bead|bird|block|book|bottle|box|boy|cake|calorie|can|"
    "candies|candy|car|card|cat|chair|chicken|child|children|clip|coin|cookie|cow|crayon|customer|"
    "dog|doll|each|egg|fish|flower|friend|fruit|game|girl|glass|goat|item|kid|leg|marble|member|"
    "men|old|orange|pack|page|pair|passenger|pen|pencil|people|person|pet|photo|piece|pie|pill|"
    "pint|pizza|plant|player|question|room|rose|sandwich|seat|sheet|shirt|shoe|slice|song|stamp|"
    "step|sticker|student|ticket|time|tomato|total|toy|tree|vote|way|wheel|women|word"
)
UNIT = (
    rf"(?:(?i:(?:kilo|centi|milli)?(?:{MEASURES}|{THINGS})(?:e?s)?)|(?:\\mu\s+|[nmcdkMG])?"
    r"(?:m|g|s|[lL]|N|J|Wh?|Pa|V|A|K|C|F|T|Hz|mol|eV|cal|B|rad|\\Omega)|h|hr|ft|in|lbs?|oz|mph|"
    r"min|atm|bar|dB|st|nd|rd|th)(?![A-Za-z])\.?(?:\^?\{?-?\d\}?)?"
)
PER = r"(?:(?:per|an?)\s)?"
BETWEEN = rf"(?:\s?(?:/\(?|\*|\\cdot)\s*|\s{PER}|[(-])"
UNITS = rf"(?:\s?°(?:\s?[CF])?|(?:\s{PER}|(?=[A-Za-z]{{2}})){UNIT}(?:{BETWEEN}{UNIT}\)?)*)?"

FUNCTIONS = "sin|cos|tan|log|ln|exp|pi"
WORD = re.compile(rf"(?<![^\W_])(?!(?:{FUNCTIONS}|mod|and|or)\b)[^\W\d_]{{2,}}")  # not 2xy
SIGNS = re.compile(r"[\\=^+*<>{}|]")  # of formulas
CODE = re.compile(
    rf"""[([]?[^\W\d_][])]?  # a letter
    | (?!\d*(?:{FUNCTIONS}))[^\W_]*[^\W\d_]\d[^\W_]*  # B12, R2D2, 3F2A
    | \d+([-/.:])\d+(?:\1\d+)+  # a date, a time with seconds, a version
    | \d{{1,2}}:\d\d(?:\s?[ap]\.?m\.?)?
    | \d+-\d+  # a range or a score
    """,
    re.VERBOSE | re.IGNORECASE,
)
WORDS = {
    r"(?<![^\W_])([^\W\d_])\.": r"\1",  # a.m., U.S.
    r":00(?=\s?[ap]m)": "",
    r"(?<![\w.,:])0+(?=\d)|_(?=\{?\d)|[{}]": "",  # 07:00, H_2O
    r"(?<!\d)\s|\s(?!\d)": "",
    r"(\d/\d+/)20(?=\d\d$)": r"\1",  # 12/25/2023
    r"^[.,;:!?'\"]+|[.,;:!?'\"]+$": "",
    r"^[([]?([^][()]*)[])]?$": r"\1",
}
"""What may be in a text, or not."""
FORMULA = {
    rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])": r"\\\1",
    rf"(?:^|(?<==))((?:[^A-Za-z\\=]|\\[A-Za-z]+)*(?<=[\d}})i])){UNITS}$": r"\1",
    r"(?<![\w.^])(\d+)/(\d+)(?= )": r"\\frac{\1}{\2}",
    r"\*\*": "^",
    "'": r"^{\\prime}",
    "%": r"\\%",
    r"(?<=[^\w}])\s(?=[A-Za-z]+$)": "",
    r"(?:(?<=[\d}])\s?|(?<=[A-Za-z])\s)((?!i$)[A-Za-z]+)$": r"{\1}",
}
"""What TRL reads: to TRL, `3t` would equal 3. Behind variables, a letter is no unit."""


def as_solution(answer: str) -> str:
    r"""Return the final answer of a text, in the last `\boxed{}` or after `####`, as TRL reads it.

    It is `$18$` for a number, `$\text{Paris}$` for a text, `$x + 1$` for a formula. A solution
    stays as it is.
    """
    boxes = BOX.findall(answer)
    plain = _plain(boxes[-1] if boxes else answer.rpartition("####")[2])
    number = _as_number(plain)
    if number is not None:
        return f"${_in_digits(*number)}$"
    is_worded = WORD.search(plain.replace(".", "")) and not SIGNS.search(plain)
    if is_worded or CODE.fullmatch(plain):
        return f"$\\text{{{plain}}}$"
    return f"${_replaced(plain, FORMULA)}$"


def is_text(solution: str) -> bool:
    """Return whether a solution is compared as text alone."""
    return re.fullmatch(r"\$\\text\{[^{}]*\}\$", solution) is not None


def accuracy_reward(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    r"""Reward function: 1 if the `\boxed{}` of a completion holds the solution, else 0.

    Formulas are compared by TRL's `accuracy_reward`, which gets all arguments and reads boxes that
    are close to each other as a list. A number or a text must be in every box.

    Args:
        completions: Conversations; the first message is graded.
        solution: Answers as in the data, or from `as_solution`.
        kwargs: Further arguments of a reward function in TRL.
    """
    from trl.rewards import accuracy_reward as compare

    solutions = [as_solution(text) for text in solution]
    texts = []
    answers = []
    for turns in completions:
        parts = BOX.split(turns[0]["content"])  # the texts outside and inside, in turn
        given = [as_solution(box) for box in parts[1::2]]
        parts[1::2] = [f"\\boxed{{{answer[1:-1]}}}" for answer in given]
        texts.append([{"content": "".join(parts)}])
        answers.append(given)
    grades = compare(texts, solutions, **kwargs)
    return [
        float(bool(given) and _is_right(given, right, grade == 1.0))
        for given, right, grade in zip(answers, solutions, grades, strict=True)
    ]


def _is_right(given: list[str], right: str, is_equal: bool) -> bool:
    """Return whether all given answers are right; `is_equal` is what TRL says."""
    is_worded = is_text(right)
    if {_key(answer, is_worded) for answer in given} == {_key(right, is_worded)}:
        return True
    if is_worded:
        return False
    number = _as_number(_plain(right))
    numbers = [_as_number(_plain(answer)) for answer in given]
    if number is None or (None in numbers and not any(map(is_text, given))):
        return is_equal
    return all(other is not None and _are_equal(number, other) for other in numbers)


def _are_equal(*numbers: tuple[bool, Fraction]) -> bool:
    """Return whether two numbers differ by no more than a millionth, and a ten-thousandth of one.

    Percent may be a unit or a hundredth.
    """
    (is_other_percent, other), (is_percent, value) = sorted(numbers)
    allowed = min(Fraction(1), abs(value) * 100) / 10**6
    factors = (1,) if is_percent == is_other_percent else (1, 100)
    return any(abs(value - other * factor) <= allowed for factor in factors)


def _plain(text: str) -> str:
    """Return an answer without what sets only its looks in TeX and Unicode."""
    text = unicodedata.normalize("NFKC", _replaced(text, LOOKS))
    is_greek = re.search("[Ͱ-Ͽ]{3}", text)
    return text if is_greek else text.translate(TO_TEX).strip()


def _as_number(plain: str) -> tuple[bool, Fraction] | None:
    """Return whether a number is in percent, and its digits; `None` for another answer."""
    text = re.sub(r"(\d)\s?(?:\\times|\\cdot|[x*])\s*10\s?\^", r"\1e", plain)
    text = re.sub(r"(?<![\w.])10\s?\^", "1e", text)
    text = re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r" \1/\2", text).strip()
    match = NUMBER.match(text)
    if match is None or len(text) > 200 or not re.fullmatch(UNITS, text[match.end() :]):
        return None
    if match["ratio"]:
        value = sum(map(Fraction, match["ratio"].split()), start=Fraction())
    else:
        value = Fraction(re.sub(r"[,'\s_]", "", match["digits"]))
    scales = dict(zip(SCALES.split("|"), POWERS, strict=True))
    exponent = int(match["power"] or 0) + scales.get(str(match["scale"]).lower(), 0)
    value *= Fraction(10) ** exponent
    return bool(match["percent"]), -value if match["sign"] == "-" else value


def _in_digits(is_percent: bool, value: Fraction) -> str:
    r"""Write `-12500`, `0.5`, `50\%` or `\frac{3}{2}`; math-verify rounds small decimals to 0."""
    digits = format(Decimal(value.numerator) / value.denominator, "f")
    if Fraction(digits) != value or 0 < abs(value) < Fraction(1, 1000):
        digits = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return digits + "\\%" * is_percent


def _key(solution: str, is_worded: bool) -> str:
    """Return a solution without what may be in a text or a formula, or not."""
    content = solution[7:-2] if is_text(solution) else solution[1:-1]
    if is_worded:
        return _replaced(content.casefold(), WORDS)
    content = re.sub(r"\{([A-Za-z]+)\}$", r"\1", content)  # of FORMULA
    return re.sub(r"(?<=[^\W\d_])_\{?(\d+)\}?|(?<!\d)\s|\s(?!\d)", r"\1", content)


def _replaced(text: str, replacements: dict[str, str]) -> str:
    for pattern, replacement in replacements.items():
        text = re.sub(pattern, replacement, text)
    return text
