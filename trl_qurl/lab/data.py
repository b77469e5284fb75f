"""Load questions with checkable answers in the format of TRL's trainers, for the reward of
`trl_qurl.lab.grading`.

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
    """Load questions as a data set with the columns `prompt` (a conversation) and `solution` (see
    `as_solution`).

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
    from datasets import Dataset, load_dataset
    from pyarrow import ArrowException

    if limit is not None and limit < 1:
        raise ValueError(
            f"limit={limit} leaves no questions: give a positive number, or None for all questions."
        )
    is_file = is_local(name_or_path) or _suffix(name_or_path) in SUFFIXES
    if not is_file:
        check_hub(name_or_path, "dataset")
    rows: Any = (
        _read(name_or_path, keep_columns)
        if is_file
        else load_dataset(name_or_path, config, split=split)
    )
    if len(rows) == 0:
        raise ValueError(f"{name_or_path} contains no questions.")
    rows = list(islice(rows, limit))
    instruction = f"\n\n{INSTRUCTION}" if needs_answers or not keep_columns else ""
    questions, solutions = [], []
    columns = {"question_column": (question_column,) if question_column else QUESTION_COLUMNS}
    columns |= (
        {"answer_column": (answer_column,) if answer_column else ANSWER_COLUMNS}
        if needs_answers
        else {}
    )
    for number, row in enumerate(rows, start=1):
        question, *answers = _pick(row, columns, name_or_path, number)
        questions.append(_as_conversation(question, instruction, name_or_path, number))
        solutions.append(_as_solution(answers[0], name_or_path, number) if answers else "")
    data = {
        name: [row.get(name) for row in rows]
        for name in dict.fromkeys(chain(*rows))
        if keep_columns
    }
    try:
        for name in data:  # one by one, to name the one that fails
            Dataset.from_dict({name: data[name]})
        return Dataset.from_dict(
            data | {"prompt": questions} | ({"solution": solutions} if instruction else {})
        )
    except (ArrowException, OverflowError) as error:
        raise ValueError(
            f"Column {name} of {name_or_path} mixes types ({error}): make all texts."
        ) from error


def _suffix(path: str) -> str:
    return Path(path.lower().removesuffix(".gz")).suffix


def _as_solution(answer: Any, source: str, number: int) -> str:
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
    messages = (
        [{"role": "user", "content": str(question)}]
        if isinstance(question, str | int | float)
        else question
    )
    try:
        *earlier, last = [
            {"role": message["role"], "content": message["content"]} for message in messages
        ]
        texts = all(isinstance(turn["content"], str) for turn in (*earlier, last))
        is_conversation = last["role"] == "user" and texts and last["content"].strip()
    except (ValueError, TypeError, KeyError):
        is_conversation = False
    if not is_conversation:
        raise ValueError(
            f"The question in row {number} of {source} is neither a text nor a conversation. A "
            "conversation is a list "
            'of messages {"role": ..., "content": a text} that ends with the role "user".'
        )
    return [*earlier, {"role": "user", "content": last["content"] + instruction}]


def _read(name: str, converts: bool) -> list[Any]:
    """Read a local file; unless `converts`, JSON numbers stay as they are written, because 1.50 may
    be an answer.
    """
    path, suffix = Path(name), _suffix(name)
    if not path.is_file():
        way = f"give a {', '.join(SUFFIXES)} file, or a Hub name.{home_advice(path)}"
        raise FileNotFoundError(f"The data set file {path} does not exist: {way}")
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{path} is not a {', '.join(SUFFIXES)} file: convert it, or give a Hub name."
        )
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix.lower() == ".gz" else content
        if suffix == ".parquet":
            from pyarrow.parquet import read_table

            return read_table(BytesIO(content)).to_pylist()
        text = content.decode("utf-8-sig")
        if suffix == ".csv":
            table = csv.DictReader(StringIO(text, newline=""))
            names = list(table.fieldnames or ())
            if len(names) == 1 and (separators := {*names[0]} & {*";\t|"}):
                raise ValueError(
                    f"its columns are separated by {separators.pop()!r}; save it with commas."
                )
            if repeated := {name for name in names if names.count(name) > 1}:
                raise ValueError(
                    f"several columns are named {', '.join(repeated)}; rename all but one."
                )
            return list(table)
        if text.lstrip().startswith("["):
            return _decode(text, 0, converts)
        return [
            _decode(line, number, converts)
            for number, line in enumerate(text.split("\n"))
            if line.strip()
        ]
    # pyarrow raises ValueErrors
    except (ValueError, OSError, EOFError, csv.Error, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as {suffix[1:]}: {error}") from error


def _decode(text: str, lines_before: int, converts: bool) -> Any:
    numbers: Any = {} if converts else {"parse_int": str, "parse_float": str}
    try:
        return json.loads(text, **numbers, parse_constant=lambda name: None)  # JSON has no NaN
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{error.msg} in line {lines_before + error.lineno}, column {error.colno}"
        ) from error


def _is_given(value: Any) -> bool:
    return value is not None and value == value and value != [] and bool(str(value).strip())


def _pick(row: Any, columns: dict[str, tuple[str, ...]], source: str, number: int) -> list[Any]:
    """Return the first value that the row has for each option, of which each allows several
    columns.
    """
    if not isinstance(row, dict) or None in row:  # csv puts surplus cells there
        raise ValueError(
            f"Row {number} of {source} is not an object, or has more cells than the file has "
            "columns."
        )
    values: list[Any] = []
    missing: dict[str, str] = {}
    for option, names in columns.items():
        given = [row[name] for name in names if _is_given(row.get(name))]
        if empty := [name for name in names if name in row and not given]:
            raise ValueError(
                f"Row {number} of {source} has an empty {empty[0]}: fill it in, or remove the row."
            )
        if not given:
            similar = next((name for name in row if str(name).strip().lower() in names), "NAME")
            missing[" or ".join(names)] = f"--{option} {shlex.quote(similar)}"
        values += given[:1]
    if missing:
        ways = f"rename the columns, or, for training, pass {' '.join(missing.values())}"
        found = f"has no {' and no '.join(missing)}; its columns are {', '.join(row) or 'none'}"
        raise ValueError(
            f"Row {number} of {source} {found}: "
            f"{ways if number == 1 else 'complete or remove the row'}."
        )
    return values
