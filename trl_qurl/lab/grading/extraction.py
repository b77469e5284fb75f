r"""Where in a completion its final answer stands.

The last box counts, also where an earlier one was right; then GSM8K's `####`; then what follows the last "answer is";
then the last formula or number. Apart from the boxes only the end of a completion is read, so that its length costs
next to nothing. What the answer means is left to the rest of the package.
"""

from __future__ import annotations

import re

TAIL = 2000
"""Characters at the end of a completion in which an answer without a box is looked for."""

MAX_BOXES = 100
"""Boxes, from the last one on, that are looked into."""

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])")
_BOX_OPTIONS = re.compile(r"(?:\s*\[[^\]\n]{0,20}\]){0,2}\s*")
_BETWEEN_BOXES = re.compile(
    r"[\s$]*(?:\\[)\]])?[\s$]*(?:\\quad|\\text\{)?\s*(?:,|;|,?\s*and|,?\s*or|和|或)\s*\}?[\s$]*(?:\\[(\[])?[\s$]*"
    r"(?:[a-zA-Z](?:_\d)?\s*=\s*)?"
)
_FARTHEST_BOXES = 40  # characters between two that are one answer
_BARE_BOX = re.compile(r"([^{}\n$]{1,50}?)\s*(?:\$|\\[)\]]|\n)")
_MARKER = re.compile(r"#{4}[ \t]*([^\n]*)")
_ANSWER = re.compile(r"(?:(?i:\banswers?\b)[^\n:=.]{0,40}?(?::|=|\b(?:is|are)\b)|答案(?:是|为|[:：])?)[\s:：*=]*")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
# A dollar sign before a number may be a price: "$5 and $7" holds no formula.
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(?=\S)([^$\n]*[^$\s])\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?\s?%?")
_SENTENCE = re.compile(r"(.*?)(?:[.!?。](?:\s|$)|\n|$)")
_LONGEST_PHRASE = 4
"""Words outside formulas that are an answer as they stand; of a longer phrase its first formula or number is one."""


def final_answer(completion: str) -> str | None:
    """The text of the final answer.

    Args:
        completion: all that the model wrote; of a completion with thoughts in `<think>`, what comes after them counts.

    Returns:
        The answer as written; `None` if there is none, or if the completion ends inside a thought or a box.
    """
    _, _, spoken = completion.rpartition("</think>")
    if "<think>" in spoken:
        return None
    boxes = list(_BOX.finditer(spoken))
    if boxes:
        answer = _last_box(spoken, boxes[-MAX_BOXES:])
        if answer != "":
            return answer
    tail = spoken[-TAIL:]
    return _marked(tail) or _announced(tail) or _last_value(tail) or None


def _last_box(text: str, boxes: list[re.Match[str]]) -> str | None:
    """The last box with something in it, and those that it continues ("x = [1] or x = [2]")."""
    answer, start = "", len(text)
    for box in reversed(boxes):
        content, end = _box_content(text, box.end())
        if content is None:
            return None if answer == "" else answer
        if not content:
            continue
        if answer == "":
            answer = content
        elif end > start or start - end > _FARTHEST_BOXES or not _BETWEEN_BOXES.fullmatch(text, end, start):
            break
        elif content != answer:
            answer = f"{content}, {answer}"
        start = box.start()
    return answer


def _box_content(text: str, position: int) -> tuple[str | None, int]:
    """What is in the box and where it ends; `None` for one that does not end."""
    options = _BOX_OPTIONS.match(text, position)
    start = options.end() if options else position
    if text[start : start + 1] != "{":
        bare = _BARE_BOX.match(text, position)
        return (bare[1].strip(), bare.end(1)) if bare else (None, position)
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[start + 1 : brace.start()].strip(), brace.end()
    return None, position


def _marked(tail: str) -> str | None:
    """What follows the last `####`, unless that is a heading: a number, or the end of the completion."""
    markers = list(_MARKER.finditer(tail))
    if not markers:
        return None
    answer = markers[-1][1].strip()
    is_last_line = not tail[markers[-1].end() :].strip()
    return answer if answer and (is_last_line or _NUMBER.fullmatch(answer.strip("$ "))) else None


def _announced(tail: str) -> str | None:
    announcements = list(_ANSWER.finditer(tail))
    if not announcements:
        return None
    sentence = _SENTENCE.match(tail, announcements[-1].end())
    return _phrase(sentence[1]) if sentence else None


def _phrase(sentence: str) -> str | None:
    sentence = sentence.strip().strip("*").strip()
    if len(_FORMULA.sub(" ", sentence).split()) <= _LONGEST_PHRASE:
        return sentence
    values = [match for match in (_FORMULA.search(sentence), _NUMBER.search(sentence)) if match]
    return _value(min(values, key=lambda match: match.start())) if values else sentence


def _last_value(tail: str) -> str | None:
    values = [*_FORMULA.finditer(tail), *_NUMBER.finditer(tail)]
    if values:
        return _value(max(values, key=lambda match: (match.end(), -match.start())))
    return tail.strip() if len(tail.split()) <= _LONGEST_PHRASE else None


def _value(match: re.Match[str]) -> str:
    return next((group for group in match.groups() if group), match[0]).strip()
