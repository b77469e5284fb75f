"""Numbers as a reader wants them: as many digits as mean something, and powers of ten for the very small."""

from __future__ import annotations

import math

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MINUS = "−"
SMALLEST, LARGEST = 1e-3, 1e4
"""Beyond these, powers of ten."""


def numeral(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, without zeros at its end: 0.0312, 1,204, 4.5 × 10⁻⁵."""
    text, *power = with_error(value, None, digits).split(" ", 1)
    return " ".join([text.rstrip("0").rstrip(".") if "." in text else text, *power])


def with_error(value: float, error: float | None, digits: int = 3) -> str:
    """A number with its error, to the error's second digit: 0.842 ± 0.011, (4.5 ± 1.2) × 10⁻⁵."""
    magnitude = max(abs(value), error or 0.0)
    power = 0 if SMALLEST <= magnitude < LARGEST or not magnitude else _exponent(magnitude)
    text = fixed(value / 10.0**power, error and error / 10.0**power, power + decimals_of(value, error, digits))
    if not power:
        return text
    return f"{text if error is None else f'({text})'} × 10{str(power).translate(SUPERSCRIPTS)}"


def fixed(value: float, error: float | None, decimals: int) -> str:
    """A number with its error, if there is one, both to so many decimals."""
    texts = [f"{round(number, decimals):,.{max(0, decimals)}f}" for number in (value, error) if number is not None]
    return " ± ".join(texts).replace("-", MINUS)


def decimals_of(value: float, error: float | None, digits: int = 3) -> int:
    """Decimals up to the error's second digit or, without one, to the value's last significant one."""
    if error:
        return 1 - _exponent(error)
    return digits - 1 - _exponent(value) if value else 0


def percentage(value: float) -> str:
    """A share: 1.2 %."""
    return f"{numeral(100 * value, digits=2)} %"


def tick(value: float, powers: bool = False) -> str:
    """A number at an axis, with as few digits as it takes; a power of ten if asked for, or if very small or large."""
    if not value or (SMALLEST <= abs(value) < LARGEST and not powers):
        return f"{value:g}".replace("-", MINUS)
    mantissa, exponent = f"{value:.3e}".split("e")
    lead = f"{float(mantissa):g}".replace("-", MINUS)
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return power if lead == "1" else f"{lead}·{power}"


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value)))
