"""Answers are graded as a careful person would: on a table of spellings, on every data set, and on hostile text.

A line of a table is a reference and, after each `||`, an answer to it.
"""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SHARED

from trl_qurl.lab import grading
from trl_qurl.lab.grading import GRADING_TIMEOUT, is_correct, is_gradable, worker
from trl_qurl.lab.grading.extraction import final_answer
from trl_qurl.lab.grading.notation import normalized
from trl_qurl.lab.grading.values import parse_number

pytest.importorskip("math_verify")

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data")

RIGHT = {
    "number": r"""
        5 || +5 || 5. || (5) || [5] || {5} || 005 || 5.00 || 2 + 3 = 5 || = 5 || \approx 5 || **5** || \{5\}
        25 || 025 || 25.0
        025 || 25
        0.5 || .5 || 0.50 || \dfrac{1}{2} || 1/2
        0 || -0 || 0.0
        1000 || 1,000 || 1{,}000 || 1\,000 || 1,\!000 || 1 000 || 10^3 || 1e3
        1,000,000 || 1 000 000 || 1,\!000,\!000 || 1000000 || 10^{6}
        12 || １２ || (1)(3)(4) || \mathbf{12} || \textbf{(12)}
        -3 || −3 || -\,3 || - 3
        300,000 || 3 \cdot 10^{5} || 3\times10^5 || 3e5
        84300000 || 8.43 \times 10^7
        0.00012 || 1.2 \times 10^{-4}
        1024 || 2^{10}
        4 || four || \mbox{four} || \text{Four}
    """,
    "fraction": r"""
        1/2 || \frac12 || 0.5 || ½ || 2/4 || \cfrac12 || \\frac{1}{2} || \tfrac 12 || \frac{2}{4} || \frac1{2}
        \frac12 || \frac{1}2 || .5 || 1:2
        \frac{-1}{2} || -\frac{1}{2} || \frac{1}{-2} || -0.5 || -1/2
        \frac{1000}{3} || \frac{1,000}{3} || 1 000/3
        \frac{1100}{3} || 1 100/3
        \frac53 || 1\frac{2}{3} || 1 2/3 || 1\tfrac23
        -15.6 || -15\frac{3}{5}
        2.5 || 2\frac12 || 2½ || 2 \frac{1}{2}
        1/3 || 0.\overline{3} || 0.\bar{3} || \frac{1}{3} \approx 0.33
        1/6 || 0.1\overline{6}
        2 || x = \frac{6}{3} = 2
    """,
    "percent": r"""
        50 || 50\% || 50 \text{ percent}
        50\% || 50 || 0.5 || 50 percent || \frac12
        0.5 || 50\% || 50%
        \frac{100}{7} || \frac{100}{7}\%
        \frac17 || \frac{100}{7}\%
        14.29\% || 14.29
    """,
    "unit": r"""
        5 || 5 \text{ cm} || 5 cm || 5cm || \text{Total: } 5 || \text{Area} = 5 || x = 5 \text{ cm}
        5 || 5 元 || 5个 || 答案是5 || 5\text{ 平方厘米}
        5 \text{ cm} || 5 || 5cm || 5 centimeters
        15 || 15 \text{ cm}^2 || 15 cm^2
        15 \text{ cm}^2 || 15 \text{ square centimeters} || 15 || 15 \text{ cm}
        15 \text{ square cm} || 15\mbox{ cm}^2
        18 || $18 || \$18 || 18 dollars || $18.00 || €18
        \$18 || 18 \text{ dollars} || 18
        \$23{,}000 || 23,000
        30^\circ || 30 || 30° || 30 \text{ degrees} || 30^{\circ} || 30\degree
        25 || 25^{\circ} \mathrm{C}
        3200 || 3200 \mathrm{~cm}^{3}
        240\text{ ways.} || 240 || 240 ways
        7 \text{ distinct integers} || 7 distinct integers || 7
        20 || 20 sq units || 20 \text{ square units}
        12\sqrt{13} || 12\sqrt{13}\text{ feet}
        6\frac{1}{6}\text{ feet} || \frac{37}{6}
        15\text{ min} || 15 \text{ minutes}
        164\pi || 164 \pi \mbox{ square feet}
    """,
    "letter": r"""
        C || \text{(C)} || (C) || \textbf{(C)} || C. || \textbf{(C)}\ 27 || C. 27 || \text{c} || \mathrm{C}
        \text{(C)} || C || (C)
        27 || \textbf{(C)}\ 27 || (C) 27
        \text{(E)}, || \text{(E)} || E
    """,
    "word": r"""
        \text{Evelyn} || Evelyn || \textbf{Evelyn.} || evelyn
        even || \text{even} || Even
        \text{Thursday} || Thursday
        two lines || \text{two lines}
        \text{yes} || Yes
        \text{A,B} || A, B || \{A, B\} || \text{B, A}
        \text{CBAD} || CBAD
        October 30 || \text{October 30}
        \emptyset || \{\} || \varnothing
        \text{是} || 是
    """,
    "tuple": r"""
        (1,2) || (1, 2) || \left( 1, 2 \right) || \langle 1, 2 \rangle || (x,y)=(1,2) || x=1, y=2 || （1，2）
        \left(\frac{1}{2},\frac{1}{2}\right) || \left(\frac12, 0.5\right)
        (100, 101) || (100,101) || (100,101.0)
        (2,2) || (\sqrt{4}, 2)
        \left(3, \frac{3}{2}\right) || (3, 1.5)
    """,
    "several": r"""
        1,2 || 1 and 2 || 2, 1 || \{1,2\} || 1 \text{ and } 2 || 1; 2 || 1和2 || x=1 or x=2 || x=2, x=1
        \{1, 2\} || \left\{2, 1\right\} || 1 \text{ or } 2
        3,-3 || x = \pm 3 || \pm 3 || -3, 3 || x=3, x=-3
        x=\pm 3 || x=3, x=-3
        1+\sqrt{19}, 1-\sqrt{19} || 1 \pm \sqrt{19}
        -2, 1-\sqrt5, 1+\sqrt5 || \{1\pm\sqrt{5},-2\}
        2, 5, 13 || n = 2, 5, 13
        (2,15), (-4,27) || (-4, 27);(2, 15) || \{(2,15), (-4,27)\}
        (2,2),(0,0),(1,1) || (0,0), (1,1), (2,2)
        6,8,10 || 6, 8\text{, and }10
        5, 1234 || 1,234, 5
        75, 75 || 75^\circ, 75^\circ
        CD = 4, AB=9 || AB=9, CD=4
    """,
    "interval": r"""
        [1,2) || [1, 2) || \left[1,2\right) || 1 \le x < 2
        (1,2) || 1 < x < 2
        \left(-\infty,5\right] || (-\infty, 5] || x \le 5 || 5 \geq x
        \mathbb{R} || (-\infty,\infty) || \text{all real numbers}
        \mathbb{R} \setminus \{3\} || \mathbb{R} \setminus \{3.0\}
        (3,4)\cup(1,2) || (1,2) \cup (3,4) || (1,2) U (3,4)
        (-\infty,1)\cup(2,\infty) || (-∞, 1) ∪ (2, ∞)
        [-2,7] || x \in [-2,7]
        120 < n \leq 130 || (120, 130]
        5 < x || x > 5 || \{x | x>5\} || \{ x \in \mathbb{R} \mid x > 5 \}
        (-\infty,-2]\cup[3,\infty) || x \le -2 \text{ or } x \ge 3
        -80\leq g(x)\leq 80 || 80 \ge g(x) \ge -80
        \infty || +\infty || infinity || ∞
    """,
    "matrix": r"""
        \begin{bmatrix}1&2\\3&4\end{bmatrix} || \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} || \left(\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right)
        \begin{pmatrix} 0.5 \\ \frac{4}{2} \end{pmatrix} || \begin{pmatrix} 1/2 \\ 2 \end{pmatrix}
        \begin{pmatrix}-6 \\ 8 \end{pmatrix} || (-6, 8) || \left[\begin{matrix} -6 \\ 8 \end{matrix}\right]
    """,
    "base": r"""
        52_8 || 52 || 52_{8} || 52_{\text{eight}}
        52 || 52_8
        1001_2 || (1001)_2
        A5_{11} || \text{A5}_{11}
    """,
    "time or ratio": r"""
        3\!:\!00 \text{ p.m.} || 3:00 PM || 3:00
        4:40\text{ am} || 4:40 a.m.
        5\!:\!00 || 05:00
        3:5 || 3/5 || 3 : 5
        1:2:3 || 1 : 2 : 3
    """,
    "expression": r"""
        (x+1)^2 || x^2+2x+1
        x^2+3x+2 || (x+1)(x+2)
        9x^2+3x || 3x(3x+1)
        16\sqrt{2}-16 || 16 \sqrt{2} - 8(2)
        2\sqrt3 || \sqrt{12} || 2√3 || 2*sqrt(3)
        \frac{1}{\sqrt{2}} || \frac{\sqrt{2}}{2} || 2^{-1/2} || sqrt(2)/2
        -1+2\sqrt3 || 2\sqrt{3}-1
        2\pi || 2*pi || 2π
        x^2 || x**2 || x²
        \sqrt2 || 2^(1/2) || √(2) || \sqrt 2
        x^{10} || x^10
        \frac{x}{2} || 0.5x || \frac{1}{2}x
        2-\sqrt3 || \tan 15^\circ
        1/2 || \cos 60^\circ
        0.5 || \sin 30^\circ || 2^{-1} || \sqrt{0.25}
        0.1x || \frac{x}{10}
        \sqrt{x} || x^{0.5} || x^0.5
        0.5(x+1) || \frac{x+1}{2}
        -0.5\sqrt2 || -\frac{\sqrt2}{2}
        \sin^2 x || 1-\cos^2 x
        \sin(2x) || 2\sin x\cos x || sin(2x)
        \ln 2 || \log 2
        \frac1e || e^{-1}
        2i || (1+i)^2 || \sqrt{-4}
        \frac{1+i}{2} || \frac{1}{2} + \frac{i}{2}
        \frac{21\pi}{2} || 10\frac{1}{2}\pi
        10 || \binom{5}{2}
        120 || 5!
        1 + 2004! || 2004!+1
        2 \cdot 2^{100}-2 || 2^{101} - 2
        \frac{n(n+1)}{2} || \frac{n^2+n}{2}
        xy || yx
        |x-1| || |1-x|
        3 || \lfloor 3.5 \rfloor || \log_2 8
        \binom{n}{m}(2n+1) || (2n+1)\binom{n}{m}
        \frac{n(n+1)}{2} || \sum_{k=1}^{n} k
        -2 || \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
        f(4-x) || f(-x+4)
        \frac{\sqrt2}{10^{50}} || \sqrt{2}\cdot 10^{-50}
        0 || \sin^2 x + \cos^2 x - 1 || \sqrt{8}-2\sqrt{2}
    """,
    "equation": r"""
        x=5 || 5 || 5 = x || \text{Total}=5
        5 || x = 5
        2x+3 || y=2x+3
        y = 2x+3 || 2x+3 || y-2x=3 || x = \frac{y-3}{2}
        x+y=1 || y+x=1 || 2x+2y=2 || x+y-1=0
        f(x) = x+1 || f(x)=1+x || x+1
        x+y \le 1 || 1 \ge x+y || 2x + 2y \le 2
        s^2 \le 8r^2 || 2s^2 \le 16r^2
        m\ne1 || m \neq 1
        \tan \theta = 2\theta || 2\theta = \tan\theta
        c < \sqrt{2} || \sqrt2>c
    """,
}

WRONG = {
    "number": r"""
        5 || -5 || 50 || 5 6 || 56 || ? || ... || 5- || \frac{5}{ || \sqrt || 5,6 || \text{ }
        72 || 71 || 7 || 2 || 172 || 72.01 || 72000
        57 || 5 7
        1 || 1,000 || 1.0001 || i || \infty
        1/3 || 0.33 || 0.333333 || 0.3333333333
        0.33 || \frac{1}{3}
        0.0000002 || 0.0000001
        .0000671 || .0000672
        1.414 || \sqrt{2}
        \pi || 3.14 || 3.14159265358979 || \frac{22}{7}
        2/3 || 3/2
        0 || 1/0 || 10^{-30}
        2/0 || 1/0
        3\times10^6 || 3\times10^5 || 3e5
        2 \cdot 10^{-50} || 10^{-50}
        1 || 2\frac12
    """,
    "percent": r"""
        0.5 || 5\%
        5 || 50\%
        5000 || 50\%
        50\% || 0.5\% || 5
    """,
    "unit": r"""
        5 \text{ cm} || 5 \text{ m} || 5 kg || 6
        5 \text{ cm}^2 || 5 \text{ cm}^3 || 5 \text{ square m} || 5 cubic cm
        5 || 6 \text{ cm} || 5 \text{ or maybe 6} || 5个6 || 答案
        3:00 PM || 3:00 \text{ AM}
        \frac{\pi}{6} || 30^\circ
        10 || 10m || 10t
        10m || 10
        3 || 3 abc
        5x || 5
        5 || 5x
    """,
    "letter": r"""
        C || D || \text{(D)} || 27 || AC || A, C || \textbf{(D)}\ 27
        27 || C
        28 || \textbf{(C)}\ 27
        A || a
        B || A:B
    """,
    "word": r"""
        \text{even} || odd || not even || uneven || \text{even or odd}
        \text{Evelyn} || \text{Evelyn and Bob} || Eve || 5
        5 || Evelyn
        \text{CBAD} || BCAD || \text{ABCD}
        \text{Thursday} || \text{Tuesday}
        \text{yes} || no
        2B || 2b
        r^2 || R^2
    """,
    "tuple": r"""
        (1,2) || (2, 1) || 2 || (1,2,3) || 1, 2 || (1,2),(3,4) || 12
        2 || (1,2)
        12 || (1,2) || 1,2
        1,2 || (1,2) || 12
        5 || (5,5)
        1000 || (1,000)
        100101 || (100,101)
        (2,1) || x=1, y=2
    """,
    "several": r"""
        1, 2 || 1, 2, 3 || 1 || 1, 1 || 1, 3
        1, 2, 3 || 1, 2
        1,2,2 || 1,1,2
        \{1,3\} || \{1,2\}
        1000 || \{1,000\}
        5 || \{5, 6\} || 5 and 6 || 5 or 7
        \pm 3 || 3 || -3
        3 || \pm 3
        x=2 || x=1 || x^2=4
        x=2, y=1 || x=1, y=2
        y=5 || x=5
        \text{Bob}=5 || \text{Alice}=5
        (1,3),(2,4) || (1,2),(3,4)
        AB=4, CD=9 || AB=9, CD=4
    """,
    "interval": r"""
        [1,2) || (1,2) || (1,2] || [1,2] || 1 < x < 2
        (1,2) || [1,2) || [1,2] || (1,2)\cup(3,4)
        \mathbb{R} \setminus \{4\} || \mathbb{R} \setminus \{3\}
        [1,2] || (2,1)
        (-\infty,5] || (-\infty, 5)
        (1,2)\cup(3,4) || (1,2)\cup[3,4) || (1,2)
        x > 5 || x < 5 || x \ge 5 || 5
        5 || x > 5 || (5, \infty)
        (-2,7) || x \in [-2,7]
        -\infty || \infty
    """,
    "matrix": r"""
        \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix} || \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        \begin{pmatrix} 1 & 2 \end{pmatrix} || \begin{pmatrix} 1 \\ 2 \end{pmatrix}
        \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} || \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
        \begin{pmatrix} 1 \\ 2 \end{pmatrix} || (2,1) || 2
    """,
    "base": r"""
        52_8 || 42 || 52_9
        101_3 || 101_2
        5 || 101_2
        101_2 || 5
    """,
    "time or ratio": r"""
        4:00 || 3:00
        5:3 || 3:5
        1:2 || 1:2:3
        4:17 || 8:34
        3 || 3:00
    """,
    "expression": r"""
        (x+1)^2 || x^2+2x
        x^2+3x+2 || (x+1)(x-2)
        \sqrt{3} || \sqrt{2}
        x^3 || x^2
        2y || 2x
        xz || xy
        \sin x || \cos x
        -\cos x || \cos(-x)
        x || |x| || \sqrt{x^2} || \frac{1}{x}
        2^{4181} || 2^{4181}+1
        2004! || 2004!+1
        2-3i || 2+3i
        5 || 2(3)
        x-y || x+y
        f(x) || f(y)
        7.389 || e^2
        0.5 || \log 2
        (-x)^2 || -x^2
        64 || 2^{3^2}
        \lceil x \rceil || \lfloor x \rfloor
        \sqrt2\cdot 10^{-48} || 2\sqrt{2}\cdot 10^{-48}
        \sqrt2 || \sqrt{2}+10^{-30}
    """,
    "equation": r"""
        2x+4 || y=2x+3
        y=3x+2 || y=2x+3
        x+y=1 || 1 || x+y<1 || x+y=2 || x-y=1
        1 || x+y=1 || m \neq 1
        x+y \ge 1 || x+y \le 1
        x+y < 1 || x+y \le 1
        m = 1 || m \neq 1
        x=x || 0=0
    """,
}


def pairs(table):
    lines = [(kind, line) for kind, lines in table.items() for line in lines.strip().splitlines()]
    split = [(kind, *[part.strip() for part in line.split("||")]) for kind, line in lines]
    return [
        pytest.param(answer, reference, id=f"{kind}: {answer} for {reference}")
        for kind, reference, *answers in split
        for answer in answers
    ]


def boxed(answer):
    return f"Let me see. So it is $\\boxed{{{answer}}}$."


@pytest.mark.parametrize(("answer", "reference"), pairs(RIGHT))
def test_the_same_answer_in_another_spelling(answer, reference):
    assert is_gradable(reference)
    assert is_correct(boxed(answer), reference)


@pytest.mark.parametrize(("answer", "reference"), pairs(WRONG))
def test_another_answer(answer, reference):
    assert is_gradable(reference)
    assert not is_correct(boxed(answer), reference)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so \\boxed{5}.", "5"),
        ("\\boxed{4}. No, wait: \\boxed{5}", "5"),
        ("\\boxed{4}.\n\n\\boxed{5}", "5"),
        ("\\boxed{5} is what goes into \\boxed{}", "5"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{ \\{1, \\frac{1}{2}\\} }", "\\{1, \\frac{1}{2}\\}"),
        ("\\fbox{5}", "5"),
        ("\\framebox[2cm]{204}", "204"),
        ("$\\boxed 5$", "5"),
        ("x = \\boxed{1} or x = \\boxed{2}", "1, 2"),
        ("$\\boxed{1}$ and $\\boxed{2}$", "1, 2"),
        ("$\\boxed{5}$, $\\boxed{5}$", "5"),
        # cut off
        ("\\boxed{5", None),
        ("\\boxed{5}, or rather \\boxed{\\frac{1}{2}", None),
        ("\\boxed", None),
        # thoughts
        ("<think>It could be \\boxed{4}.</think> The answer is 5.", "5"),
        ("It could be \\boxed{4}.</think>\\boxed{5}", "5"),
        ("<think>\\boxed{5} is likely, but", None),
        ("<think>\\boxed{5}</think>", None),
        # GSM8K
        ("2 + 3 = 5\n#### 1,234", "1,234"),
        ("The total is 9.\n#### 5\nI hope this helps you with step 7.", "5"),
        ("#### Step 1\nIt is 4.\n#### Step 2\nThe total is 5", "5"),
        ("\\boxed{5}\n#### 4", "5"),
        # announced
        ("The answer is 5.", "5"),
        ("The answer is **5**.", "5"),
        ("The answer is 5. Let me check: 2 + 3 = 5, and 10 / 2 = 5, which leaves 0.", "5"),
        ("The answer is 5 apples, which cost $10.", "5"),
        ("The answer is 4? No, the answer is 5.", "5"),
        ("**Answer:** $x=5$", "$x=5$"),
        ("**Final Answer**\n\nThe final answer is: $\\frac{1}{2}$. I hope it is correct.", "$\\frac{1}{2}$"),
        ("The answers are 3 and 4.", "3 and 4"),
        ("The answer is $3$ or $5$.", "$3$ or $5$"),
        ("The answer is even.", "even"),
        ("The answer is (C).", "(C)"),
        ("所以答案是 72。", "72"),
        # the last formula or number
        ("it is 72", "72"),
        ("10-5=5", "5"),
        ("it falls to -5", "-5"),
        ("He pays $5 and gets $7", "7"),
        ("thus $x = 5$", "x = 5"),
        ("thus \\( x = 5 \\)", "x = 5"),
        ("thus \\[ x = \\frac{1}{2} \\]", "x = \\frac{1}{2}"),
        ("thus 3/4", "3/4"),
        ("72 of 5 ", "5"),
        ("Evelyn", "Evelyn"),
        ("", None),
        (" \n", None),
        ("I have thought about it for long and do not know.", None),
    ],
)
def test_where_the_final_answer_stands(completion, answer):
    assert final_answer(completion) == answer


@pytest.mark.parametrize("reference", ["5", "0", "x^2", "C", "\\text{Evelyn}", "(1,2)", "\\boxed{5}", "None"])
def test_gradable_references(reference):
    assert is_gradable(reference)


@pytest.mark.parametrize("reference", ["", "  ", "$$", "\\frac{k!n!}{(k+n-1)!", "9" * 2000, "{" * 99 + "}" * 99])
def test_references_that_nothing_can_equal(reference):
    assert not is_gradable(reference)
    assert not is_correct(boxed(reference), reference)


def test_a_boxed_reference_is_its_content():
    assert is_correct(boxed("5"), "\\boxed{5}")
    assert not is_correct(boxed("4"), "\\boxed{5}")


# Properties

fractions = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4)
integers = st.integers(min_value=-(10**9), max_value=10**9)


def spellings(number: Fraction) -> list[str]:
    sign, over, under = "-" * (number < 0), abs(number.numerator), number.denominator
    whole, rest = divmod(over, under)
    spelled = [f"{number.numerator}/{under}", f"\\frac{{{number.numerator}}}{{{under}}}"]
    spelled += [f"{sign}\\dfrac{{{7 * over}}}{{{7 * under}}}", f"$ {sign}{over:,}/{under:,} $"]
    if under == 1:
        spelled += [f"{number}", f"{number}.00", f"{sign}0{over}", f"{sign}{over:,}", f"{number} \\text{{ cm}}"]
        spelled += [f"{sign}{over:,}".replace(",", separator) for separator in ("{,}", ",\\!", "\\,", " ")]
    elif whole:
        spelled += [f"{sign}{whole}\\frac{{{rest}}}{{{under}}}", f"{sign}{whole} {rest}/{under}"]
    return spelled


@given(fractions, fractions)
@settings(deadline=None, max_examples=80)
def test_numbers_are_equal_in_any_spelling_and_only_to_themselves(number, other):
    for one in spellings(number):
        assert is_correct(boxed(one), spellings(number)[0])
        assert is_correct(boxed(spellings(number)[-1]), one)
        assert is_correct(boxed(one), spellings(other)[-1]) == (number == other)


@given(st.decimals(min_value=-1000, max_value=1000, places=4, allow_nan=False))
@settings(deadline=None, max_examples=100)
def test_decimals_are_exact(decimal):
    assert parse_number(f"{decimal:f}") == Fraction(decimal)
    assert is_correct(boxed(f"{decimal:f}"), str(Fraction(decimal)))
    assert not is_correct(boxed(f"{decimal:f}1"), f"{decimal:f}")


@given(
    st.lists(integers, min_size=2, max_size=6).flatmap(
        lambda values: st.tuples(st.just(values), st.permutations(values))
    )
)
@settings(deadline=None, max_examples=100)
def test_order_matters_in_a_tuple_and_not_in_a_set(both):
    values, permuted = both
    one, other = (", ".join(map(str, each)) for each in (values, permuted))
    assert is_correct(boxed(f"\\{{{other}\\}}"), one)
    assert is_correct(boxed(f"({other})"), f"({one})") == (values == permuted)
    assert not is_correct(boxed(f"{other}, {values[0]}"), one)
    assert not is_correct(boxed(", ".join(map(str, permuted[1:]))), one)


TEX = [
    "\\frac",
    "\\sqrt",
    "\\text",
    "\\boxed",
    "\\pm",
    "\\cup",
    "\\begin{pmatrix}",
    "\\\\",
    "&",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
]
TEX += [
    ",",
    ";",
    "=",
    "<",
    "^",
    "_",
    "%",
    "$",
    "\\circ",
    ":",
    "1",
    "23",
    "0.5",
    "x",
    "i",
    "and",
    "####",
    "是",
    "\0",
    "\ud800",
    " ",
]


@given(
    st.lists(st.sampled_from(TEX), max_size=12).map("".join), st.lists(st.sampled_from(TEX), max_size=6).map("".join)
)
@settings(deadline=None, max_examples=60)
def test_no_text_raises(answer, reference):
    for completion in (answer, boxed(answer)):
        assert is_correct(completion, reference) in (True, False)
    assert is_gradable(reference) in (True, False)


# Hostile completions. Some of them are ended by the limit on computing time, the others should not get that far.

HOSTILE = {
    "garbage": "asd $%^&*( \\frac{ }{ \n" * 5000,
    "braces": boxed("{" * 10_000 + "5" + "}" * 10_000),
    "open braces": "\\boxed{" + "{" * 100_000,
    "fractions in fractions": boxed("\\frac{" * 1000 + "1" + "}{2}" * 1000),
    "open fractions": "\\boxed{" + "\\frac{" * 50_000,
    "roots in roots": boxed("\\sqrt{" * 1000 + "2" + "}" * 1000),
    "parentheses": boxed("(" * 5000),
    "boxes": "\\boxed{6} " * 20_000,
    "empty boxes": "\\boxed{}" * 20_000,
    "open boxes": "\\boxed{" * 20_000,
    "digits": boxed("9" * 10**6),
    "digits without a box": "9" * 10**6,
    "digits under the limit": boxed("9" * 900),
    "tower": boxed("9^{9^{9^9}}"),
    "powers": boxed("10**10**10"),
    "power of a variable": boxed("x^{10000000000}"),
    "factorial": boxed("100000000!"),
    "factorials": boxed("9!!!!!!"),
    "exponentials": boxed("e^{e^{e^{e^{e^{9}}}}}"),
    "polynomial": boxed("(a+b+c+d+e+f+g)^{200}"),
    "list": boxed("1," * 400 + "1"),
    "signs": boxed("-" * 900 + "6"),
    "equations": boxed("x=" * 450),
    "answers": "the answer is " * 20_000,
    "dollars": "$" * 100_000,
    "dollars and text": "$ a " * 30_000,
    "hashes": "####" * 30_000,
    "brackets": "\\[" * 30_000,
    "spaces": boxed(" " * 900 + "x" + " " * 90),
    "thousands": boxed("1" + ",000" * 240),
    "null bytes": "\0" * 10_000 + boxed("\0"),
    "surrogates": "\ud800\udfff" + boxed("\udc00"),
    "accents": boxed("6" + "\u0301" * 500),
    "code": boxed('__import__("os").abort()'),
}
ENDED = {
    "integral": boxed("\\int_0^{\\infty} e^{-x^2}\\sin(x^3)\\cos(x^7) dx"),
    "binomial": boxed("\\binom{1000000000}{500000000}"),
}
SLACK = 10.0
"""Seconds for a first start of the worker on a busy machine, on top of the documented limit."""


def grade_in_time(completion, reference):
    start = time.monotonic()
    verdict = is_correct(completion, reference)
    assert time.monotonic() - start < GRADING_TIMEOUT + SLACK
    return verdict


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("reference", ["5", "\\sqrt{2}+x"])
def test_hostile_completions_are_wrong_in_time(name, reference):
    assert not grade_in_time(HOSTILE[name], reference)


@pytest.mark.parametrize("name", ["tower", "digits", "open braces", "equations"])
def test_hostile_references_are_wrong_in_time(name):
    assert not grade_in_time(boxed("x+1"), HOSTILE[name].removeprefix("Let me see. So it is "))


@pytest.mark.parametrize("name", ["tower", "powers", "power of a variable", "factorial", "factorials"])
def test_large_numbers_are_refused_before_they_take_time(name):
    large = normalized(final_answer(HOSTILE[name]))
    assert not worker.compare(large, "x+1")  # which would raise OutOfTimeError
    assert not worker.compare("x+1", large)


@pytest.mark.parametrize("name", ENDED)
def test_endless_algebra_is_ended_in_any_thread(name):
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(grade_in_time(ENDED[name], "\\sqrt{2}")))
    thread.start()
    thread.join(2 * (GRADING_TIMEOUT + SLACK))
    assert verdicts == [False]
    # Whoever asks next gets the verdict on the next question.
    assert is_correct(boxed(f"\\sqrt{{2}}\\cdot{len(name)}"), f"{len(name)}\\sqrt2")
    assert not is_correct(boxed(f"\\sqrt{{2}}\\cdot{len(name)}"), f"{len(name)}\\sqrt3")


# The worker


@pytest.fixture
def fresh_verdicts():
    """Without those remembered from other tests."""
    grading._compared.cache_clear()
    yield
    grading._compared.cache_clear()


def test_numbers_do_without_the_worker(monkeypatch):
    monkeypatch.setattr(grading, "_compared", None)
    for number in range(1000):
        assert is_correct(boxed(number), str(number))
        assert not is_correct(boxed(f"\\frac{{{number}}}{{7}}"), str(number + 1))


def test_a_killed_worker_is_replaced(fresh_verdicts):
    assert is_correct(boxed("\\sqrt{8}"), "2\\sqrt2")
    killed = worker._worker.pid
    os.killpg(killed, signal.SIGKILL)
    assert is_correct(boxed("\\sqrt{12}"), "2\\sqrt3")
    assert worker._worker.pid != killed


def test_an_interrupted_question_leaves_no_verdict_behind(fresh_verdicts, monkeypatch):
    assert is_correct(boxed("\\sqrt{8}"), "2\\sqrt2")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker._Worker, "_read_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            is_correct(boxed("\\sqrt{18}"), "3\\sqrt2")
    assert not is_correct(boxed("\\sqrt{12}"), "2\\sqrt2")


def test_threads_get_the_verdicts_on_their_own_questions(fresh_verdicts):
    verdicts = {}

    def ask(root):
        for other in range(2, 6):
            verdicts[root, other] = is_correct(boxed(f"\\sqrt{{{4 * root}}}"), f"2\\sqrt{{{other}}}")

    threads = [threading.Thread(target=ask, args=[root]) for root in range(2, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert verdicts == {(root, other): root == other for root in range(2, 6) for other in range(2, 6)}


def test_the_verdict_depends_on_nothing_that_came_before(fresh_verdicts):
    table = [parameters.values for kind in ("expression", "equation") for parameters in pairs({kind: RIGHT[kind]})]
    table += [parameters.values for kind in ("expression", "equation") for parameters in pairs({kind: WRONG[kind]})]
    table = table[::5]
    verdicts = [is_correct(boxed(answer), reference) for answer, reference in table]
    assert set(verdicts) == {True, False}
    worker.stop()
    grading._compared.cache_clear()
    assert [is_correct(boxed(answer), reference) for answer, reference in reversed(table)] == verdicts[::-1]


SCRIPT = r"""
import os, sys
print("main", flush=True)
from trl_qurl.lab.grading import is_correct, worker
print(sorted({"sympy", "math_verify", "latex2sympy2_extended", "torch", "trl"} & set(sys.modules)), flush=True)
print(is_correct(r"\boxed{\sqrt{8}}", r"2\sqrt2"), worker._worker.pid, flush=True)
child = os.fork()
if child == 0:
    print(is_correct(r"\boxed{\sqrt{12}}", r"2\sqrt3"), worker._worker.pid, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(is_correct(r"\boxed{\sqrt{18}}", r"2\sqrt3"), worker._worker.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_has_a_worker_of_its_own_that_ends_with_it(tmp_path):
    """In a script without a main guard, which a worker started by `multiprocessing` would run again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "math_verify.py").write_text("raise ImportError")  # found first only by one that looks where it runs
    finished = subprocess.run(
        [sys.executable, "-P", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    main, heavy, own, childs, again = [line.split() for line in finished.stdout.splitlines()]
    assert (main, heavy) == (["main"], ["[]"])
    assert (own[0], childs[0], again[0]) == ("True", "True", "False")
    assert own[1] == again[1] != childs[1]
    assert finished.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while any(is_running(int(pid)) for pid in (own[1], childs[1])):
        assert time.monotonic() < deadline, "a worker outlived its process"
        time.sleep(0.1)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_worker_imports_no_torch():
    code = (
        "import sys, trl_qurl.lab.grading.process as p; "
        "assert p._warm_up(); print({'torch', 'trl'} & set(sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert finished.stdout == "set()\n", finished.stderr


def test_missing_math_verify_names_the_extra(tmp_path, monkeypatch, fresh_verdicts):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no math here')")
    monkeypatch.syspath_prepend(tmp_path)
    worker.stop()
    with pytest.raises(ImportError, match=r"pip install trl-qurl\[math\].*no math here"):
        is_correct(boxed("\\sqrt{8}"), "2\\sqrt2")
    assert is_correct(boxed("8"), "8")
    worker.stop()


# The data sets

NAMES = [
    *["gsm8k/train", "gsm8k/test", "math500/test", "aime2024/test", "amc2023/test", "amc2022_2023/test"],
    *["dapo_math_17k/train", "deepscaler/train_subset", "deepscaler/train_components"],
]

UNGRADABLE = {
    "deepscaler/train_subset": {1184: "the reference is cut off: \\frac{2 k n}{n+k-1}-2 \\frac{k!n!}{(k+n-1)!"}
}

SOLUTIONS_WITHOUT_THE_ANSWER = {
    "aime2024/test": {
        1: "no box; a second solution that stops at x=10 and y=2.5, where xy=25 was asked for",
        11: "no box; ends in a file name and signatures",
        13: "no box; ends in 'then proceed as in solution 3' and signatures",
        14: "no box; ends in 'the rest is similar to solution 3' and a signature",
    },
    "deepscaler/train_components": {
        957: "no box; ends in a copyright notice",
        965: "no box; ends in 17/18, where 035 was asked for",
    },
}

EQUAL_NEIGHBOURS = {
    "math500/test": {("5", "x=5")},
    "deepscaler/train_subset": {("$12$", "12")},
    "deepscaler/train_components": {
        ("8", "K=8"),
        ("25\\%", "25"),
        ("120", "120^\\circ"),
        ("21\\text{ dogs}", "21"),
        ("18 \\text{ degrees}", "18"),
    },
}
"""Pairs of answers to different questions, given one after the other, that are equal up to a name or a unit."""


def rows_of(name):
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@needs_data
@pytest.mark.parametrize("name", NAMES)
def test_every_row_answers_itself(name):
    answers = [row["answer"] for row in rows_of(name)]
    ungradable = {index for index, answer in enumerate(answers) if not is_gradable(answer)}
    wrong = {index for index, answer in enumerate(answers) if not is_correct(boxed(answer), answer)}
    assert wrong == ungradable == set(UNGRADABLE.get(name, {}))


@needs_data
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("amc", "dapo"))])
def test_every_solution_has_the_answer(name):
    rows = [(index, row) for index, row in enumerate(rows_of(name)) if row.get("solution")]
    assert rows
    wrong = {index for index, row in rows if not is_correct(row["solution"], row["answer"])}
    assert wrong == set(SOLUTIONS_WITHOUT_THE_ANSWER.get(name, {}))


def equal_neighbours(name, stride):
    answers = [row["answer"] for row in rows_of(name)]
    neighbours = list(zip(answers, answers[1:] + answers[:1], strict=True))[::stride]
    return {(one, other) for one, other in neighbours if one != other and is_correct(boxed(one), other)}


@needs_data
@pytest.mark.parametrize("name", NAMES)
def test_no_row_answers_its_neighbour(name):
    stride = {"math500/test": 4, "deepscaler/train_subset": 16, "deepscaler/train_components": 64}.get(name, 1)
    assert equal_neighbours(name, stride) <= EQUAL_NEIGHBOURS.get(name, set())


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_row_answers_its_neighbour_in_the_whole_set(name):
    assert equal_neighbours(name, 1) == EQUAL_NEIGHBOURS.get(name, set())


EQUAL_NEAR_MISSES = {
    (
        "\\$\\dfrac23 \\approx \\$0.68",
        "\\$\\dfrac23 \\approx \\$0.67",
    ): "both are 2/3 to the eye that reads the exact side",
    ("1.56 = 56\\%", "0.56 = 56\\%"): "of an equation of numbers the last side counts",
}
SLIPS = [("+", "-"), ("x", "y"), ("(", "["), ("\\sqrt", "\\sin"), ("\\pi", "")]


def near_misses(answer):
    """The answer with its first or last digit off by one, or one sign exchanged."""
    digits = [index for index, character in enumerate(answer) if character in "0123456789"]
    for index in {*digits[:1], *digits[-1:]}:
        yield f"{answer[:index]}{(int(answer[index]) + 1) % 10}{answer[index + 1 :]}"
    for sign, other in SLIPS:
        if sign in answer:
            yield answer.replace(sign, other, 1)


def equal_near_misses(stride):
    names = ("math500/test", "deepscaler/train_subset", "deepscaler/train_components")
    answers = sorted({row["answer"] for name in names for row in rows_of(name)})[::stride]
    return {(near, answer) for answer in answers for near in near_misses(answer) if is_correct(boxed(near), answer)}


@needs_data
def test_near_misses_are_wrong():
    assert equal_near_misses(stride=20) <= set(EQUAL_NEAR_MISSES)


@needs_data
@pytest.mark.slow
def test_all_near_misses_are_wrong():
    assert equal_near_misses(stride=1) == set(EQUAL_NEAR_MISSES)


REPRINTED_OTHERWISE = {
    "2^{4181}": "has more digits than an answer may have",
    "2^{4950}": "has more digits than an answer may have",
    "\\frac{1}{7}\\triangle ABC": "SymPy prints a variable called triangle",
}


def answers_that_sympy_reprints(stride):
    """Expressions of the data sets and what SymPy makes of them: other order, other fractions, roots worked out."""
    from sympy import Expr, expand, latex

    from trl_qurl.lab.grading.algebra import expression
    from trl_qurl.lab.grading.structure import Value, structure
    from trl_qurl.lab.grading.values import read

    names = ("math500/test", "deepscaler/train_subset", "deepscaler/train_components")
    answers = sorted({row["answer"] for name in names for row in rows_of(name)})
    for answer in answers[::stride]:
        value = structure(normalized(answer))
        reading = read(value.text) if isinstance(value, Value) else None
        if reading is None or reading.number is not None or reading.word or "!" in answer or "\\text" in reading.text:
            continue
        try:
            parsed = expression(reading.text)
        except Exception:
            continue  # what this test is about are those that can be read; the next assertion counts them
        if isinstance(parsed, Expr):
            yield answer, latex(parsed.doit())
            yield answer, latex(expand(parsed.doit()))


def wrong_reprints(stride, at_least):
    reprinted = list(answers_that_sympy_reprints(stride))
    assert len(reprinted) >= at_least
    wrong = {answer for answer, printed in reprinted if not is_correct(boxed(printed), answer)}
    return wrong


@needs_data
def test_expressions_are_equal_however_sympy_prints_them():
    assert wrong_reprints(stride=15, at_least=100) <= set(REPRINTED_OTHERWISE)


@needs_data
@pytest.mark.slow
def test_all_expressions_are_equal_however_sympy_prints_them():
    assert wrong_reprints(stride=1, at_least=1500) == set(REPRINTED_OTHERWISE)
