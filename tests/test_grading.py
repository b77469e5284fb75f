"""Answers are graded by math-verify in a process that can be ended: spellings, benchmarks, hostile text, lifetimes.

A line of a table is a reference and, after each `||`, an answer to it.
"""

import gzip
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import SHARED

from trl_qurl.rewards import GRADING_TIMEOUT, answer_reward, is_correct

pytest.importorskip("math_verify")

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="needs ../shared/data")

RIGHT = r"""
    5 || +5 || (5) || 005 || 5.00 || 2 + 3 = 5 || \{5\} || x = 5 || 5 \text{ cm} || 5.
    1000 || 1,000 || 1{,}000 || 10^3
    300,000 || 3 \cdot 10^{5} || 3\times10^5
    1/2 || .5 || \frac12 || 0.5 || 2/4 || \\frac{1}{2} || \tfrac 12 || 50\%
    \frac{-1}{2} || -\frac{1}{2} || \frac{1}{-2} || -0.5
    -15.6 || -15\frac{3}{5}
    \$18 || 18 \text{ dollars} || 18 || $18
    30^\circ || 30 || 30 \text{ degrees}
    C || \text{(C)} || (C)
    \text{Evelyn} || Evelyn || evelyn
    (1,2) || (1, 2) || \left( 1, 2 \right)
    1,2 || 1 and 2 || 2, 1 || \{1,2\} || x=1 or x=2
    3,-3 || \pm 3 || -3, 3
    [1,2) || \left[1,2\right)
    x > 5 || 5 < x || (5, \infty)
    (3,4)\cup(1,2) || (1,2) \cup (3,4)
    \begin{bmatrix}1&2\\3&4\end{bmatrix} || \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
    (x+1)^2 || x^2+2x+1
    2\sqrt3 || \sqrt{12}
    \frac{1}{\sqrt{2}} || \frac{\sqrt{2}}{2} || 2^{-1/2}
    \sin^2 x || 1-\cos^2 x
    10 || \binom{5}{2}
    y = 2x+3 || 2x+3 || y-2x=3
    \boxed{5} || 5
    $x^2$ || x^2
"""

WRONG = r"""
    5 || -5 || 50 || 5 6 || ? || \frac{5}{ || \sqrt || 5,6 || \text{ }
    72 || 71 || 7 || 2 || 172 || 72.01 || 72000
    1/3 || 0.33
    50\% || 0.5\% || 5
    C || D || 27 || A, C
    \text{Evelyn} || \text{Evelyn and Bob} || 5
    (1,2) || (2, 1) || 2 || (1,2,3)
    1, 2 || 1, 2, 3 || 1 || 1, 3
    [1,2) || (1,2) || [1,2]
    x > 5 || x < 5 || x \ge 5 || 5
    \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} || \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
    (x+1)^2 || x^2+2x
    \sqrt{3} || \sqrt{2} || 1.73
    2004! || 2004!+1
    2-3i || 2+3i
    y=3x+2 || y=2x+3
"""


def pairs(table):
    lines = [[part.strip() for part in line.split("||")] for line in table.strip().splitlines()]
    return [(answer, reference) for reference, *answers in lines for answer in answers]


def boxed(answer):
    return f"Let me see. So it is $\\boxed{{{answer}}}$."


def test_the_same_answer_in_another_spelling():
    assert [pair for pair in pairs(RIGHT) if not is_correct(boxed(pair[0]), pair[1])] == []


def test_another_answer():
    assert [pair for pair in pairs(WRONG) if is_correct(boxed(pair[0]), pair[1])] == []


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("\\boxed{4}. No, wait: \\boxed{5}", "5"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{5}\n#### 4", "5"),
        ("\\fbox{5}", "5"),
        ("x = \\boxed{1} or x = \\boxed{2}", "1, 2"),
        ("\\boxed{5", None),
        ("\\boxed{5}, or rather \\boxed{\\frac{1}{2}", None),
        ("\\boxed{5} " + "and so on. " * 1000 + "It was not 4", "5"),
        ("<think>It could be \\boxed{4}.</think> The answer is 5.", "5"),
        ("<think>\\boxed{5} is likely, but", None),
        ("<think>\\boxed{5}</think>", None),
        ("2 + 3 = <<2+3=5>>5\n#### 1,234", "1234"),
        ("The answer is 5. Let me check: 2 + 3 = 5, and 10 / 2 = 5, which leaves 0.", "5"),
        ("The final answer is: $\\frac{1}{2}$. I hope it is correct.", "0.5"),
        ("thus \\[ x = \\frac{1}{2} \\]", "x = \\frac{1}{2}"),
        ("I have thought about it for long and do not know.", None),
    ],
)
def test_where_the_final_answer_is(completion, answer):
    """`None`: neither 5 nor 1/2, which all of these mention, is an answer that was given."""
    if answer is None:
        assert not is_correct(completion, "5") and not is_correct(completion, "0.5")
    else:
        assert is_correct(completion, answer)


TEX = ["\\frac", "\\sqrt", "\\text", "\\boxed", "\\pm", "\\begin{pmatrix}", "\\\\", "&", "{", "}", "(", ")", "[", "="]
TEX += [",", "<", "^", "_", "%", "$", "1", "23", "0.5", "x", "i", "and", "####", "是", "\0", "\ud800", "\n", " "]
texts = st.lists(st.sampled_from(TEX), max_size=10).map("".join)


@given(texts, texts)
@settings(deadline=None, max_examples=40)
def test_no_text_raises(answer, reference):
    for completion in (answer, boxed(answer)):
        assert is_correct(completion, reference) in (True, False)
        assert answer_reward([completion], [reference])[0] in (None, 0.0, 1.0)


# Benchmarks ----------------------------------------------------------------------------------------------------------


def answers_of(name, count):
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file][:count]


@needs_data
def test_right_and_wrong_answers_of_two_benchmarks():
    """Math-verify accepted 943 of these 947 right answers when it was chosen, and none of 940 wrong ones."""
    accepted, wrong, equal = 0, 0, []
    for name, count in (("math500/test", 500), ("gsm8k/test", 447)):
        answers = [row["answer"] for row in answers_of(name, count)]
        accepted += sum(is_correct(boxed(answer), answer) for answer in answers)
        others = [pair for pair in zip(answers, answers[1:], strict=False) if len(set(pair)) == 2]
        wrong += len(others)
        equal += [(one, other) for one, other in others if is_correct(boxed(one), other)]
    assert accepted >= 943
    assert wrong > 900 and equal == [("5", "x=5")]  # answers to two questions that are indeed equal


@needs_data
def test_worked_solutions_of_a_benchmark_hold_their_answers():
    rows = [*answers_of("math500/test", 500)[::5], *answers_of("gsm8k/test", 100)]
    assert [row["answer"] for row in rows if not is_correct(row["solution"], row["answer"])] == []


# Hostile completions -------------------------------------------------------------------------------------------------

HOSTILE = {
    "braces": boxed("{" * 10_000 + "5" + "}" * 10_000),
    "open fractions": "\\boxed{" + "\\frac{" * 50_000,
    "roots in roots": boxed("\\sqrt{" * 120 + "2" + "}" * 120),
    "boxes": "\\boxed{6} " * 20_000,
    "digits": boxed("9" * 10**6),
    "dollars and text": "$ a " * 30_000,
    "code": boxed('__import__("os").abort()'),
}
ENDED = {"tower": boxed("9^{9^{9^9}}"), "memory": boxed("10^{10^{11}}"), "factorial": boxed("100000000!")}


def test_hostile_completions_are_wrong():
    assert [name for name, completion in HOSTILE.items() if is_correct(completion, "5")] == []


@pytest.mark.parametrize("name", ENDED)
def test_endless_comparisons_are_ended_in_any_thread_and_the_next_is_answered(name):
    with ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(is_correct, ENDED[name], "\\sqrt{2}+x")
        assert hostile.result(GRADING_TIMEOUT + 30) is False  # and the start of a worker on a busy machine
        assert pool.submit(is_correct, boxed("\\sqrt{8}"), "2\\sqrt2").result(60) is True


def test_threads_get_the_verdicts_on_their_own_questions():
    questions = [(root, other) for root in range(2, 6) for other in range(2, 6)]
    with ThreadPoolExecutor(4) as pool:
        verdicts = pool.map(lambda q: is_correct(boxed(f"\\sqrt{{{4 * q[0]}}}"), f"2\\sqrt{{{q[1]}}}"), questions)
    assert list(verdicts) == [root == other for root, other in questions]


# The worker ----------------------------------------------------------------------------------------------------------

SCRIPT = r"""
import os, pathlib, signal, sys, threading
print("main", flush=True)
from trl_qurl.rewards import is_correct

def worker():
    (pid,) = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return pid

def ask(answer, reference):
    print(is_correct("\\boxed{%s}" % answer, reference), worker(), flush=True)

print(sorted({"sympy", "math_verify", "torch", "trl"} & set(sys.modules)), flush=True)
ask(r"\sqrt{8}", r"2\sqrt2")
maps = pathlib.Path(f"/proc/{worker()}/maps").read_text()
limits = pathlib.Path(f"/proc/{worker()}/limits").read_text()
(space,) = [line for line in limits.splitlines() if "address space" in line]
print("libtorch" in maps, "unlimited" in space.split()[3])  # vLLM preloads torch's OpenMP into every child
sys.stdout.flush()
if os.fork() == 0:
    ask(r"\sqrt{12}", r"2\sqrt3")
    os._exit(0)
os.wait()
ask(r"\sqrt{18}", r"2\sqrt3")
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    is_correct(r"\boxed{100000000!}", r"\sqrt{2}+x")
except KeyboardInterrupt:
    print("interrupted", flush=True)
ask(r"\sqrt{12}", r"2\sqrt3")
os.kill(int(worker()), signal.SIGKILL)
ask(r"\sqrt{12}", r"2\sqrt2")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_has_a_worker_of_its_own_that_ends_with_it(tmp_path):
    """In a script without a main guard, which a worker started by `multiprocessing` would run again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "math_verify.py").write_text("raise ImportError")  # found first by who looks into its directory
    done = subprocess.run([sys.executable, "-P", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    lines = [line.split() for line in done.stdout.splitlines()]
    main, heavy, first, kinds, child, again, interrupted, after, killed = lines
    assert (main, heavy, kinds) == (["main"], ["[]"], ["False", "False"]), "no second run, no torch, limited memory"
    assert [line[0] for line in (first, child, again, after, killed)] == ["True", "True", "False", "True", "False"]
    assert first[1] == again[1] and interrupted == ["interrupted"]
    assert len({line[1] for line in (first, child, after, killed)}) == 4
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{line[1]}/exe").exists() for line in (first, child, after, killed)):
        assert time.monotonic() < deadline, "a worker outlived its process"
        time.sleep(0.05)
