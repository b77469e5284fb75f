"""Load questions with checkable answers in the format of TRL's trainers and of `trl.rewards.accuracy_reward`.

`datasets` reads a Hub data set or a local file, with a column of questions and a column of answers. All checks run
here, before loading a model or starting an engine. TRL applies the chat template.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
QUESTION_COLUMNS = ("question", "problem", "prompt")
ANSWER_COLUMNS = ("answer", "final_answer")
LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""Loaders of `datasets` for local files, by suffix; `.gz` may follow."""


def load_questions(
    name_or_path: str,
    split: str = "train",
    config: str | None = None,
    limit: int | None = None,
    question_column: str | None = None,
    answer_column: str | None = None,
    needs_answers: bool = True,
) -> Dataset:
    """Load questions as a data set with the columns `prompt` (a conversation) and `solution` (the answer in LaTeX).

    Args:
        name_or_path: Hub name (`openai/gsm8k`), or a local `.json`, `.jsonl`, `.csv` or `.parquet` file (or `.gz`).
        split: Split of a Hub data set; ignored for local files.
        config: Configuration of a Hub data set (`main` for GSM8K); ignored for local files.
        limit: Keep only the first `limit` questions; `None` keeps all.
        question_column: Defaults to the first of `QUESTION_COLUMNS` that exists. Contains texts, or conversations that
            end with a user message; `INSTRUCTION` is appended to that message.
        answer_column: Defaults to the first of `ANSWER_COLUMNS` that exists. Lists of answers are joined with commas.
        needs_answers: Whether rows must have an answer; if not, `solution` is empty.

    Returns:
        One row per question, in the original order.

    Raises:
        FileNotFoundError: If `name_or_path` looks like a local file that does not exist.
        ValueError: If there are no questions, a column is missing, a question is neither a text nor a conversation, or
            the file cannot be read.
    """
    from datasets import Dataset, load_dataset

    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} leaves no questions: give a positive number, or None for all questions.")
    is_local = _loader(name_or_path) or name_or_path.startswith((".", "/", "~")) or Path(name_or_path).exists()
    rows = _read_local(name_or_path) if is_local else load_dataset(name_or_path, config, split=split)
    if len(rows) == 0:
        raise ValueError(f"{name_or_path} contains no questions.")
    questions, solutions = [], []
    question_columns = QUESTION_COLUMNS if question_column is None else (question_column,)
    answer_columns = ANSWER_COLUMNS if answer_column is None else (answer_column,)
    columns = (question_columns, answer_columns) if needs_answers else (question_columns,)
    for number, row in enumerate(islice(rows, limit), start=1):
        question, *answers = _pick(row, columns, name_or_path, number)
        questions.append(_instructed(question, name_or_path, number))
        texts = (", ".join(map(str, answer)) if isinstance(answer, list) else str(answer) for answer in answers)
        solutions.append("".join(map(as_solution, texts)))
    return Dataset.from_dict({"prompt": questions, "solution": solutions})


def as_solution(answer: str) -> str:
    r"""Return the final answer between dollar signs: without them, TRL finds numbers, but no `\frac{1}{2}` or `C`.

    Args:
        answer: Text from the answer column; what follows `####`, as in GSM8K's solutions, is the final answer.

    Returns:
        The final answer as a formula.
    """
    final = answer.rpartition("####")[2].strip(" $\n").rstrip(".")
    return f"${final}$"


def _instructed(question: Any, source: str, number: int) -> list[dict[str, str]]:
    """Turn a question into a conversation that ends with the instruction."""
    messages = question if isinstance(question, list) else [{"role": "user", "content": str(question)}]
    try:
        *earlier, last = [{"role": message["role"], "content": message["content"]} for message in messages]
        is_conversation = last["role"] == "user" and all(isinstance(turn["content"], str) for turn in (*earlier, last))
    except (ValueError, TypeError, KeyError):
        is_conversation = False
    if not is_conversation:
        raise ValueError(
            f"The question in row {number} of {source} is neither a text nor a conversation. A conversation is a list "
            'of messages {"role": ..., "content": a text} that ends with the role "user".'
        )
    return [*earlier, {"role": "user", "content": f"{last['content']}\n\n{INSTRUCTION}"}]


def _read_local(name: str) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    path, loader = Path(name).expanduser(), _loader(name)
    if not path.is_file():
        raise FileNotFoundError(
            f"The data set file {path} does not exist: give a {', '.join(LOADERS)} file, or a Hub name."
        )
    if loader is None:
        raise ValueError(f"{path} is not a {', '.join(LOADERS)} file: convert it, or give a Hub name.")
    try:
        return load_dataset(loader, data_files=str(path), split="train")
    except (DatasetGenerationError, ValueError, OSError, StopIteration) as error:
        raise ValueError(f"{path} cannot be read as {loader}: {error.__cause__ or repr(error)}") from error


def _loader(path: str) -> str | None:
    return LOADERS.get(Path(path.removesuffix(".gz")).suffix)


def _pick(row: dict[str, Any], columns: tuple[tuple[str, ...], ...], source: str, number: int) -> list[Any]:
    """Return the first value that the row has in each group of columns."""
    candidates = [[row[name] for name in names if row.get(name) is not None] for names in columns]
    missing = [" or ".join(names) for names, values in zip(columns, candidates, strict=True) if not values]
    if missing:
        raise ValueError(
            f"Row {number} of {source} has no {' and no '.join(missing)}; its columns are {', '.join(row) or 'none'}: "
            "rename the columns, or set question_column and answer_column (not in `eval` and `mismatch`)."
        )
    return [values[0] for values in candidates]
