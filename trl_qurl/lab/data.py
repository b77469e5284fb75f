"""Load questions with checkable answers, for TRL's trainers and the reward of `lab.grading`.

`datasets` reads the Hub. Its readers of files guess types: a column of 007 and 1.50 becomes 7 and
1.5, and the text 2024-01-05 a date. So CSV and JSON are read here as they are written. All checks
come before a model is loaded or an engine starts.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.options import check_hub
from trl_qurl.lab.grading import as_solution, is_text
from trl_qurl.paths import is_local

if TYPE_CHECKING:
    from datasets import Dataset

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
COLUMNS = {
    "question": ("question", "problem", "prompt"),
    "answer": ("answer", "final_answer", "solution", "ground_truth"),
}
"""Their usual names; the first that is there counts."""

FORMS = {
    "question": 'a text, or messages {"role": ..., "content": a text} that end with the user\'s',
    "answer": "a text, a number, or a list of these",
}
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
"""Local files that can be read; `.gz` may follow, except after `.parquet`."""

CHECKED = 1000
"""Formulas that are read before a run, in a few seconds."""

Row = dict[str, Any]


class WrittenFloat(float):
    """A number of a JSON file that keeps its digits: 1.50 may be an answer."""

    def __init__(self, digits: str) -> None:
        self._digits = digits

    def __str__(self) -> str:
        return self._digits


def load_questions(
    name_or_path: str,
    split: str = "train",
    config: str | None = None,
    limit: int | None = None,
    question_column: str | None = None,
    answer_column: str | None = None,
    needs_answers: bool = True,
    keep_columns: bool = False,
) -> Dataset:
    """Load questions as a data set with the columns `prompt` and `solution`.

    A prompt is a conversation; for solutions see `as_solution`.

    Args:
        name_or_path: Hub name (`openai/gsm8k`), or a local `.json`, `.jsonl`, `.csv` or `.parquet`
            file.
        split: Split of a Hub data set; ignored for local files.
        config: Configuration of a Hub data set (`main` for GSM8K); ignored for local files.
        limit: Keep only the first `limit` questions; `None` keeps all.
        question_column: Defaults to the first of `COLUMNS` that is there. Texts, or
            conversations that end with a user message, to which `INSTRUCTION` is appended.
        answer_column: Defaults to the first of `COLUMNS` that is there. Lists of answers are
            joined with commas.
        needs_answers: Whether rows must have an answer; if not, `solution` is empty.
        keep_columns: Whether to keep the other columns, for your own reward functions; one that
            mixes types becomes text. Without `needs_answers`, this also leaves `solution` as it is
            and appends no `INSTRUCTION`.

    Returns:
        One row per question, in the original order.

    Raises:
        FileNotFoundError: If `name_or_path` looks like a local file that does not exist.
        ValueError: If the file cannot be read, or a question or an answer is missing or malformed.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} leaves no questions: give a positive number, or None.")
    rows = list(islice(_load_rows(name_or_path, split, config), limit))
    _check_rows(rows, name_or_path)
    has_own_reward = keep_columns and not needs_answers
    columns: dict[str, list[Any]] = {}
    if keep_columns:
        for name in dict.fromkeys(chain.from_iterable(rows)):
            columns[name] = _as_column([row.get(name) for row in rows])
    columns["prompt"] = _converted(
        rows,
        "question",
        question_column,
        partial(_as_conversation, not has_own_reward),
        name_or_path,
    )
    if needs_answers:
        columns["solution"] = _converted(rows, "answer", answer_column, _as_solution, name_or_path)
    elif not keep_columns:
        columns["solution"] = [""] * len(rows)
    from datasets import Dataset

    return Dataset.from_dict(columns)


def describe_solutions(solutions: Sequence[str]) -> str:
    """Say how answers are compared, and how many formulas math-verify cannot read.

    Args:
        solutions: As from `as_solution`.

    Returns:
        A line for the screen.
    """
    from math_verify import parse

    texts = sum(map(is_text, solutions))
    formulas = [
        solution
        for solution in dict.fromkeys(solutions)
        if not is_text(solution) and re.search(r"[^-.\d$]", solution)
    ]
    unread = [
        formula
        for formula in formulas[:CHECKED]
        if all(isinstance(form, str) for form in parse(formula))  # it returns the text as well
    ]
    line = f"{len(solutions) - texts} answers are compared as mathematics, {texts} as text"
    if unread:
        count = sum(solution in unread for solution in solutions)
        line += f"; no form is known for {count}, such as {unread[0]}: only the same text is right"
        if len(formulas) > CHECKED:
            line += f" (of the first {CHECKED} formulas)"
    return f"{line}."


def _load_rows(name: str, split: str, config: str | None) -> Iterable[Row]:
    """Return the rows of a file or a Hub data set."""
    path = Path(name)
    suffix = Path(name.lower().removesuffix(".gz")).suffix
    if not is_local(name) and suffix not in SUFFIXES:
        check_hub(name, "dataset")
        from datasets import load_dataset

        return load_dataset(name, config, split=split)
    if not path.is_file():
        raise FileNotFoundError(
            f"{name} is not an existing {', '.join(SUFFIXES)} file: give one (~ is not expanded), "
            "or a Hub name."
        )
    if suffix not in SUFFIXES:
        raise ValueError(f"{name} is not a {', '.join(SUFFIXES)} file: convert it to one.")
    try:
        if suffix == ".parquet":
            from pyarrow.parquet import read_table

            return read_table(path).to_pylist()
        opened = gzip.open if path.suffix.lower() == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            if suffix == ".csv":
                return list(csv.DictReader(file, skipinitialspace=True))
            return _read_json(file.read())
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not in UTF-8: save it again in this encoding.") from None
    except Exception as error:  # of four libraries
        raise ValueError(f"{path} cannot be read as {suffix[1:]}: {error}. Correct it.") from error


def _read_json(text: str) -> list[Row]:
    """Read a JSON list, or one object per line."""
    if text.lstrip().startswith("["):
        return json.loads(text, parse_float=WrittenFloat)
    rows = []
    for position, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                rows.append(json.loads(line, parse_float=WrittenFloat))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{error.msg} in line {position}, column {error.colno}: write a list of objects, "
                "or one object in each line"
            ) from error
    return rows


def _check_rows(rows: list[Row], source: str) -> None:
    if not rows:
        raise ValueError(f"{source} contains no questions: add rows, or use another file.")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or None in row:  # csv puts surplus cells there
            raise ValueError(
                f"Row {number} of {source} is not an object, or has more cells than the file has "
                "columns: correct or remove it."
            )


def _converted(
    rows: list[Row],
    kind: str,
    column: str | None,
    convert: Callable[[Any], Any],
    source: str,
) -> list[Any]:
    """Return the questions or answers; `convert` returns `None` for what is neither."""
    names = COLUMNS[kind] if column is None else (column,)
    present = dict.fromkeys(chain.from_iterable(rows))
    name = next((name for name in names if name in present), None)
    if name is None:
        raise ValueError(
            f"{source} has no column {' or '.join(names)}, only {', '.join(present)}: rename one, "
            f"or, for training, pass --{kind}_column NAME."
        )
    converted = []
    for number, row in enumerate(rows, start=1):
        value = convert(row.get(name))
        if value is None:
            raise ValueError(
                f"The {name} in row {number} of {source} is {row.get(name)!r}, but must be "
                f"{FORMS[kind]}: fill it in, or remove the row."
            )
        converted.append(value)
    return converted


def _as_column(values: list[Any]) -> list[Any]:
    """Return values as they are, or as texts if Arrow has no type for all of them."""
    import pyarrow

    try:
        pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError):
        return [None if value is None else str(value) for value in values]
    return values


def _as_conversation(is_instructed: bool, question: Any) -> list[dict[str, str]] | None:
    """Turn a question into a conversation, which may end with the instruction."""
    before: list[dict[str, str]] = []
    text = question
    match question:
        case [*before, {"role": "user", "content": text}]:
            pass
    if not _is_given(text):
        return None
    instruction = f"\n\n{INSTRUCTION}" if is_instructed else ""
    return [*before, {"role": "user", "content": f"{text}{instruction}"}]


def _as_solution(answer: Any) -> str | None:
    parts = answer if isinstance(answer, list) else [answer]
    if not parts or not all(map(_is_given, parts)):
        return None
    return as_solution(", ".join(map(str, parts)))


def _is_given(value: Any) -> bool:
    """Return whether a value is a number, or a text that is not empty."""
    if value is None or isinstance(value, dict | list):
        return False
    is_nan = value != value
    return not is_nan and bool(str(value).strip())
