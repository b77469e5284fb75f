"""The paper's benchmarks by name, and any other set of questions by path or by name on the Hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trl_qurl.lab.data import LOCAL_SUFFIXES, load_questions


class Source(NamedTuple):
    """Where a benchmark is on the Hub."""

    name: str
    config: str | None = None
    split: str = "test"


SOURCES = {
    "gsm8k": Source("openai/gsm8k", "main"),
    "math500": Source("HuggingFaceH4/MATH-500"),
    "aime24": Source("HuggingFaceH4/aime_2024", split="train"),
    "amc23": Source("math-ai/amc23"),
    "minerva": Source("math-ai/minervamath"),
    "olympiad": Source("math-ai/olympiadbench"),
}
"""The sets the paper evaluates on (GSM8K, AIME24, and the five of DeepScaleR)."""

ALLOWED = (
    f"choose one of {', '.join(SOURCES)}, or give a local {' or '.join(LOCAL_SUFFIXES)} file, a name on the Hub "
    "(owner/set, or owner/set:config:split), or name=source"
)


@dataclass(frozen=True)
class Task:
    """A benchmark, loaded."""

    name: str  # as shown in tables
    prompts: list[Any]  # one conversation per question
    answers: list[str]

    @property
    def digest(self) -> str:
        """Hash of its contents, so that answers to other questions are never taken for answers to these."""
        return hashlib.blake2b(json.dumps([self.prompts, self.answers]).encode(), digest_size=8).hexdigest()


def load_task(spec: str, limit: int | None = None) -> Task:
    """Load the first `limit` questions of a benchmark.

    `spec` is a name in `SOURCES`; a local `.json`, `.jsonl`, `.json.gz` or `.jsonl.gz`; a name on the Hub
    (`owner/set`, optionally `owner/set:config:split`); or `name=source` with any of these as the source.
    """
    name, separator, source = spec.partition("=")
    if not separator:
        name, source = _shown_name(spec), spec
    if not name or not source:
        raise ValueError(f"The task {spec!r} is not of the form name=source; {ALLOWED}.")
    place, config, split = _find_source(source)
    questions = load_questions(place, split, config, limit)
    return Task(name, questions["prompt"][:], questions["answer"][:])


def load_tasks(specs: list[str], limit: int | None = None) -> list[Task]:
    """Load several benchmarks, whose names must differ."""
    tasks = [load_task(spec, limit) for spec in specs]
    names = [task.name for task in tasks]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Two tasks are called {', '.join(doubled)}: rename one of them, as in name=source.")
    if not tasks:
        raise ValueError(f"No task is named; {ALLOWED}.")
    return tasks


def encode_prompt(tokenizer: Any, prompt: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation in the model's chat template; without one, of its bare text and a new line."""
    if tokenizer.chat_template is None:
        return list(tokenizer("\n\n".join(message["content"] for message in prompt) + "\n")["input_ids"])
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])


def needed_context(config: Any, prompts: Iterable[Sequence[int]], max_tokens: int) -> int:
    """Tokens of the longest prompt with its answer; `ValueError` if the model's context is shorter."""
    longest = max(map(len, prompts))
    needed = longest + max_tokens
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or needed
    if needed > context:
        room = context - longest
        advice = f"give at most --max-tokens {room}" if room > 0 else "give shorter questions, or use another model"
        raise ValueError(
            f"The longest prompt has {longest} tokens, which with {max_tokens} more do not fit into the model's "
            f"context of {context}: {advice}."
        )
    return needed


def _find_source(source: str) -> Source:
    if source in SOURCES:
        return SOURCES[source]
    if source.endswith(LOCAL_SUFFIXES) or source.startswith((".", "/", "~")):
        return Source(source)
    name, *further = source.split(":")
    if "/" not in name or len(further) > 2:
        raise ValueError(f"There is no task {source!r}; {ALLOWED}.")
    config, split = (*further, "", "")[:2]
    return Source(name, config or None, split or "test")


def _shown_name(spec: str) -> str:
    if not spec.endswith(LOCAL_SUFFIXES):
        return spec.split(":")[0].split("/")[-1]
    path = Path(spec)
    stem = path.name.split(".")[0]
    return path.parent.name or stem if stem in ("train", "test") else stem
