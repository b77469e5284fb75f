"""The paper's benchmarks by name, and other sets of questions by path or Hub name."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_qurl.lab.data import SUFFIXES, load_questions
from trl_qurl.lab.grading import accuracy_reward
from trl_qurl.paths import is_local

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCES = {
    "gsm8k": "openai/gsm8k:main",
    "math500": "HuggingFaceH4/MATH-500",
    "aime24": "HuggingFaceH4/aime_2024::train",
    "amc23": "math-ai/amc23",
    "minerva": "math-ai/minervamath",
    "olympiad": "math-ai/olympiadbench",
}
"""The paper's benchmarks (GSM8K, AIME24, the five of DeepScaleR), as `owner/set:config:split`."""

ALLOWED = (
    f"choose one of {', '.join(SOURCES)}, or give a local {', '.join(SUFFIXES)} file, a Hub name "
    "(owner/set, or owner/set:config:split), or name=source"
)


@dataclass(frozen=True)
class Task:
    """A loaded benchmark."""

    name: str  # for tables
    prompts: list[Any]  # one conversation per question
    solutions: list[str]  # references, as `trl.rewards.accuracy_reward` takes them

    @property
    def digest(self) -> str:
        """Hash of the questions and answers, which prevents reusing answers to other questions."""
        content = json.dumps([self.prompts, self.solutions])
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


class Source(NamedTuple):
    """Where the questions of a benchmark are."""

    name: str  # of the benchmark
    path: str  # a file, or a Hub name
    config: str | None = None
    split: str = "test"


def parse_task(spec: str) -> Source:
    """Return where a benchmark is; raise `ValueError` if `spec` is none.

    `spec` is a name in `SOURCES`; a local `.json`, `.jsonl`, `.csv` or `.parquet` file; a Hub name
    (`owner/set`, optionally `owner/set:config:split`); or `name=source` with any of these as the
    source.
    """
    name, separator, source = spec.partition("=")
    if not separator:
        source = spec
        file_or_set = spec.split(":")[0].split("/")[-1]
        name = file_or_set.split(".")[0]
    if not name or not source:
        raise ValueError(f"The task {spec!r} is not of the form name=source: {ALLOWED}.")
    if source not in SOURCES:
        has_suffix = source.lower().removesuffix(".gz").endswith(SUFFIXES)
        if has_suffix or (":" not in source and is_local(source)):
            return Source(name, source)
    path, *parts = SOURCES.get(source, source).split(":")
    if "/" not in path or len(parts) > 2:
        raise ValueError(f"Unknown task {source!r}: {ALLOWED}.")
    config, split = [*parts, "", ""][:2]
    return Source(name, path, config or None, split or "test")


def load_tasks(
    specs: Sequence[str], limit: int | None = None, needs_answers: bool = True
) -> list[Task]:
    """Load the first `limit` questions of several benchmarks.

    Without `needs_answers`, `solutions` are empty. Raises `ValueError` if names repeat or there are
    none, before anything is loaded.
    """
    sources = [parse_task(spec) for spec in specs]
    names = [source.name for source in sources]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(
            f"Several tasks are named {', '.join(repeated)}: rename them with name=source."
        )
    if not sources:
        raise ValueError(f"The list of tasks is empty: {ALLOWED}.")
    tasks = []
    for name, path, config, split in sources:
        questions = load_questions(path, split, config, limit, needs_answers=needs_answers)
        tasks.append(Task(name, questions["prompt"][:], questions["solution"][:]))
    return tasks


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Any, **template: Any) -> list[int]:
    """Tokenize a conversation, or a text as a user's turn, as TRL's trainers do.

    Without a chat template, a text stays as it is, and a conversation becomes its plain text and a
    newline. `template` goes to `apply_chat_template`: what a trainer passes, such as
    `chat_template_kwargs`.
    """
    if tokenizer.chat_template is None:
        text = prompt
        if not isinstance(prompt, str):
            text = "\n\n".join(turn["content"] for turn in prompt) + "\n"
        return list(tokenizer(text)["input_ids"])
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    encoded = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True, **template
    )
    return list(encoded["input_ids"])


def are_correct(completions: Sequence[str], solutions: Sequence[str]) -> list[bool]:
    """Grade completions with the recipes' reward."""
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    return [reward == 1.0 for reward in accuracy_reward(messages, list(solutions))]


def encode_prompts(
    model: str, prompts: Iterable[Any], max_tokens: int, **template: Any
) -> tuple[list[list[int]], int]:
    """Tokenize prompts for the model in a directory, as TRL's trainers do.

    Also returns the length of the longest with its answer. Raises `ValueError` if that exceeds the
    context.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoded = [encode_prompt(tokenizer, prompt, **template) for prompt in prompts]
    longest = max(map(len, encoded))
    needed = longest + max_tokens
    config = AutoConfig.from_pretrained(model).get_text_config()
    context = getattr(config, "max_position_embeddings", None) or needed
    if needed > context:
        room = context - longest
        advice = "use shorter questions, or another model"
        if room > 0:
            advice = f"use at most --max-tokens {room}"
        raise ValueError(
            f"The longest prompt ({longest} tokens) and --max-tokens {max_tokens} do not fit into "
            f"the model's context of {context}: {advice}."
        )
    return encoded, needed
