"""Load questions with checkable answers, for TRL's trainers and the reward of `lab.grading`.

`datasets` reads the Hub, but not local files: it would need a writable cache, and guess types (a
CSV's NA, or long integers beside decimals). All checks run here, before loading a model or starting
an engine.
"""

from __future__ import annotations

import csv
import gzip
import json
import shlex
import zlib
from collections import Counter
from collections.abc import Iterable
from io import BytesIO, StringIO
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.options import check_hub
from trl_qurl.lab.grading import as_solution
from trl_qurl.paths import home_advice, is_local

if TYPE_CHECKING:
    from datasets import Dataset

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
QUESTION_COLUMNS: tuple[str, ...] = ("question", "problem", "prompt")
ANSWER_COLUMNS: tuple[str, ...] = ("answer", "final_answer", "solution", "ground_truth")
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
"""Local files that can be read; `.gz` may follow."""


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
            file (or `.gz`).
        split: Split of a Hub data set; ignored for local files.
        config: Configuration of a Hub data set (`main` for GSM8K); ignored for local files.
        limit: Keep only the first `limit` questions; `None` keeps all.
        question_column: Defaults to `QUESTION_COLUMNS`. Texts, or conversations that end with a
            user message, to which `INSTRUCTION` is appended.
        answer_column: Defaults to `ANSWER_COLUMNS`. Lists of answers are joined with commas.
        needs_answers: Whether rows must have an answer; if not, `solution` is empty.
        keep_columns: Whether to keep the other columns, for your own reward functions. Without
            `needs_answers`, this also leaves `solution` as it is and appends no `INSTRUCTION`.

    Returns:
        One row per question, in the original order.

    Raises:
        FileNotFoundError: If `name_or_path` looks like a local file that does not exist.
        ValueError: If the file cannot be read, or a question or an answer is missing or malformed.
    """
    rows = _load_rows(name_or_path, split, config, limit, keep_columns)
    columns = {"question_column": (question_column,) if question_column else QUESTION_COLUMNS}
    if needs_answers:
        columns["answer_column"] = (answer_column,) if answer_column else ANSWER_COLUMNS
    has_own_reward = keep_columns and not needs_answers
    instruction = "" if has_own_reward else f"\n\n{INSTRUCTION}"
    questions = []
    solutions = []
    for number, row in enumerate(rows, start=1):
        picked = _pick(row, columns, name_or_path, number)
        question = picked["question_column"]
        questions.append(_as_conversation(question, instruction, name_or_path, number))
        solution = ""
        if needs_answers:
            solution = _as_solution(picked["answer_column"], name_or_path, number)
        solutions.append(solution)
    data: dict[str, list[Any]] = {}
    if keep_columns:
        for name in dict.fromkeys(chain(*rows)):
            data[name] = [row.get(name) for row in rows]
    data["prompt"] = questions
    if not has_own_reward:
        data["solution"] = solutions
    return _as_dataset(data, name_or_path)


def _load_rows(
    name: str, split: str, config: str | None, limit: int | None, converts: bool
) -> list[Any]:
    """Return the first rows of a local file or of a Hub data set."""
    if limit is not None and limit < 1:
        raise ValueError(
            f"limit={limit} leaves no questions: give a positive number, or None for all questions."
        )
    if is_local(name) or _suffix(name) in SUFFIXES:
        table: Iterable[Any] = _read(name, converts)
    else:
        check_hub(name, "dataset")
        from datasets import load_dataset

        table = load_dataset(name, config, split=split)
    rows = list(islice(table, limit))
    if not rows:
        raise ValueError(f"{name} contains no questions.")
    return rows


def _as_dataset(columns: dict[str, list[Any]], source: str) -> Dataset:
    from datasets import Dataset
    from pyarrow import ArrowException

    for name, values in columns.items():  # one by one, to name the one that fails
        try:
            Dataset.from_dict({name: values})
        except (ArrowException, OverflowError) as error:
            raise ValueError(
                f"Column {name} of {source} mixes types ({error}): make all texts."
            ) from error
    return Dataset.from_dict(columns)


def _suffix(path: str) -> str:
    return Path(path.lower().removesuffix(".gz")).suffix


def _as_solution(answer: object, source: str, number: int) -> str:
    parts = answer if isinstance(answer, list) else [answer]
    if any(isinstance(part, dict | list) or not _is_given(part) for part in parts):
        raise ValueError(
            f"The answer in row {number} of {source} is not a text, number or list of these: "
            f"{answer!r}."
        )
    return as_solution(", ".join(map(str, parts)))


def _as_conversation(
    question: Any, instruction: str, source: str, number: int
) -> list[dict[str, str]]:
    """Turn a question into a conversation that ends with the instruction."""
    messages = question
    if isinstance(question, str | int | float):
        messages = [{"role": "user", "content": str(question)}]
    try:
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
        last = turns[-1]
        are_texts = all(isinstance(turn["content"], str) for turn in turns)
        is_conversation = last["role"] == "user" and are_texts and last["content"].strip()
    except (TypeError, KeyError, IndexError):
        is_conversation = False
    if not is_conversation:
        raise ValueError(
            f"The question in row {number} of {source} is neither a text nor a conversation. A "
            "conversation is a list "
            'of messages {"role": ..., "content": a text} that ends with the role "user".'
        )
    last["content"] += instruction
    return turns


def _read(name: str, converts: bool) -> list[Any]:
    """Read a local file.

    Unless `converts`, JSON numbers stay as they are written, because 1.50 may be an answer.
    """
    path = Path(name)
    suffix = _suffix(name)
    if not path.is_file():
        way = f"give a {', '.join(SUFFIXES)} file, or a Hub name.{home_advice(path)}"
        raise FileNotFoundError(f"The data set file {path} does not exist: {way}")
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{path} is not a {', '.join(SUFFIXES)} file: convert it, or give a Hub name."
        )
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(content)
        if suffix == ".parquet":
            from pyarrow.parquet import read_table

            return read_table(BytesIO(content)).to_pylist()
        text = content.decode("utf-8-sig")
        return _read_csv(text) if suffix == ".csv" else _read_json(text, converts)
    except (ValueError, OSError, EOFError, csv.Error, zlib.error) as error:
        # pyarrow's errors are ValueErrors, too.
        raise ValueError(f"{path} cannot be read as {suffix[1:]}: {error}") from error


def _read_csv(text: str) -> list[Any]:
    table = csv.DictReader(StringIO(text, newline=""))
    names = list(table.fieldnames or ())
    for separator in ";\t|":
        if len(names) == 1 and separator in names[0]:
            raise ValueError(f"its columns are separated by {separator!r}; save it with commas.")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"several columns are named {', '.join(repeated)}; rename all but one.")
    return list(table)


def _read_json(text: str, converts: bool) -> list[Any]:
    """Read a JSON list, or one object per line."""
    if text.lstrip().startswith("["):
        return _decode(text, 0, converts)
    lines = enumerate(text.split("\n"))
    return [_decode(line, number, converts) for number, line in lines if line.strip()]


def _decode(text: str, lines_before: int, converts: bool) -> Any:
    numbers: dict[str, Any] = {} if converts else {"parse_int": str, "parse_float": str}
    try:
        return json.loads(text, **numbers, parse_constant=lambda name: None)  # JSON has no NaN
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{error.msg} in line {lines_before + error.lineno}, column {error.colno}"
        ) from error


def _is_given(value: object) -> bool:
    return value is not None and value == value and value != [] and bool(str(value).strip())


def _pick(
    row: object, columns: dict[str, tuple[str, ...]], source: str, number: int
) -> dict[str, Any]:
    """Return the first value that the row has for each option, which allows several columns."""
    if not isinstance(row, dict) or None in row:  # csv puts surplus cells there
        raise ValueError(
            f"Row {number} of {source} is not an object, or has more cells than the file has "
            "columns."
        )
    picked = {}
    missing = {}
    for option, names in columns.items():
        present = [name for name in names if name in row]
        given = [name for name in present if _is_given(row[name])]
        if given:
            picked[option] = row[given[0]]
        elif present:
            raise ValueError(
                f"Row {number} of {source} has an empty {present[0]}: fill it in, or remove the "
                "row."
            )
        else:
            similar = next((name for name in row if str(name).strip().lower() in names), "NAME")
            missing[" or ".join(names)] = f"--{option} {shlex.quote(similar)}"
    if missing:
        way = "complete or remove the row"
        if number == 1:
            way = f"rename the columns, or, for training, pass {' '.join(missing.values())}"
        raise ValueError(
            f"Row {number} of {source} has no {' and no '.join(missing)}; its columns are "
            f"{', '.join(row) or 'none'}: {way}."
        )
    return picked
