"""The reward is mathematical equality of the final answer, in any thread."""

import sys
import threading

import pytest

from trl_qurl.rewards import answer_reward

pytest.importorskip("math_verify")

CASES = [
    ("so the answer is \\boxed{72}.", "72", 1.0),
    ("so the answer is \\boxed{71}.", "72", 0.0),
    ("\\boxed{1,234}", "1234", 1.0),
    ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
    ("\\boxed{18 \\text{ dollars}}", "18", 1.0),
    ("First \\boxed{3}. Half of what is left over from that.\n\nIn the end: \\boxed{4}", "4", 1.0),
    ("there are 72 of them, but I mean \\boxed{71}", "72", 0.0),
    ("it is 72", "72", 1.0),
    ("I do not know", "72", 0.0),
    ("", "72", 0.0),
]
COMPLETIONS, ANSWERS, REWARDS = (list(column) for column in zip(*CASES, strict=True))


def test_texts():
    assert answer_reward(COMPLETIONS, ANSWERS) == REWARDS


def test_conversations_count_their_last_message():
    conversations = [
        [{"role": "assistant", "content": "\\boxed{0}"}, {"role": "assistant", "content": text}]
        for text in COMPLETIONS
    ]
    assert answer_reward(completions=conversations, answer=ANSWERS, prompts=[None], trainer_state=None) == REWARDS


def test_another_thread_gives_the_same():
    found = []
    thread = threading.Thread(target=lambda: found.extend(answer_reward(COMPLETIONS, ANSWERS)))
    thread.start()
    thread.join()
    assert found == REWARDS


def test_a_reference_that_cannot_be_parsed_is_left_out():
    assert answer_reward(["\\boxed{1}", "\\boxed{1}"], ["", "1"]) == [None, 1.0]


def test_missing_math_verify_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"pip install 'trl-qurl\[math\]'"):
        answer_reward(["1"], ["1"])
