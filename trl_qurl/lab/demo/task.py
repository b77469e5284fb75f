"""The task: `abc+def=` is answered by the four digits of the sum, units first, and an end token.

Units first, because a carry then comes from digits already written; zero-padded, because every answer then has the
same length and one teacher-forced pass scores it exactly. `B` problems, `P` = 8 prompt tokens, `A` = 5 answer tokens.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

SMALLEST, LARGEST = 100, 999  # three-digit operands
PROMPT_TOKENS = 8
ANSWER_TOKENS = 5
PAD, END = "<pad>", "<end>"
CHARACTERS = "0123456789+="
VOCABULARY_SIZE = 100  # more than the task needs, so that the policy has something to learn to leave out
HELD_OUT_ONE_IN = 16


class Problem(NamedTuple):
    """One sum; `prompt` has 8 characters, `answer` the 4 digits of the sum with the units first."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the policy reads."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """What it should write, before the end token."""
        return f"{self.left + self.right:04d}"[::-1]

    @property
    def held_out(self) -> bool:
        """Whether the problem belongs to the held-out split; `a+b` and `b+a` always fall in the same one."""
        low, high = sorted(self)
        # Knuth's multiplicative hash: spreads neighbors over both splits and is the same on every machine.
        return ((low * 1000 + high) * 2654435761 % 2**32) * HELD_OUT_ONE_IN < 2**32


def sample_problems(count: int, seed: int, held_out: bool = False) -> list[Problem]:
    """Draw `count` problems of one split, uniformly and with replacement; the same seed gives the same problems."""
    generator = random.Random(seed)
    problems: list[Problem] = []
    while len(problems) < count:
        problem = Problem(generator.randint(SMALLEST, LARGEST), generator.randint(SMALLEST, LARGEST))
        if problem.held_out == held_out:
            problems.append(problem)
    return problems


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A character-level tokenizer in Hugging Face's own format, which TRL, vLLM and llm-compressor all load."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [PAD, END, *CHARACTERS]
    symbols += [f"<unused{index}>" for index in range(VOCABULARY_SIZE - len(symbols))]
    tokenizer = Tokenizer(models.WordLevel({symbol: index for index, symbol in enumerate(symbols)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # The unknown token is named because a loader that sees a Qwen2 would otherwise add one beyond the embedding.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=PAD, padding_side="left"
    )


def encode_problems(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Prompts and answers as one tensor of token ids, shape (B, P + A); the last column is the end token."""
    import torch

    texts = [problem.prompt + problem.answer + tokenizer.eos_token for problem in problems]
    return torch.tensor(tokenizer(texts)["input_ids"])  # (B, P + A)


def build_dataset(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """The problems as TRL wants them: `prompt` (text) and `answer_ids` (the `A` token ids of the right answer)."""
    from datasets import Dataset

    answers = encode_problems(problems, tokenizer)[:, PROMPT_TOKENS:].tolist()
    return Dataset.from_dict({"prompt": [problem.prompt for problem in problems], "answer_ids": answers})


def exact_match(completion_ids: list[list[int]], answer_ids: list[list[int]], **kwargs: object) -> list[float]:
    """Reward: 1 for exactly the right tokens, end token included, else 0.

    Token ids and not text, because text has lost its special tokens: `43<pad>21` would read as `4321`.
    """
    return [float(list(given) == list(right)) for given, right in zip(completion_ids, answer_ids, strict=True)]
