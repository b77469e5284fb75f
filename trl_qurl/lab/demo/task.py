"""The task: answer `abc+def=` with the four digits of the sum, units first, and an end token.

With the units first, each carry depends only on digits already written. Zero-padding gives every
answer the same length, so one teacher-forced pass scores it exactly. `B` problems, `P` = 8 prompt
tokens, `A` = 5 answer tokens.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

SMALLEST = 100  # three-digit operands
LARGEST = 999
PROMPT_TOKENS = 8
PAD = "<pad>"
END = "<end>"
CHARACTERS = "0123456789+="
VOCABULARY_SIZE = 100  # more than the task needs, so the policy has to learn to avoid unused tokens
HELD_OUT_ONE_IN = 16


class Problem(NamedTuple):
    """One sum; `prompt` has 8 characters, `answer` has the 4 digits of the sum, units first."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The policy's input."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The correct output, without the end token."""
        return f"{self.left + self.right:04d}"[::-1]

    @property
    def held_out(self) -> bool:
        """Whether the problem is in the held-out split, in which `b+a` then is, too."""
        low, high = sorted(self)
        # Knuth's multiplicative hash spreads neighbors over both splits and gives the same result
        # on every machine.
        hashed = (low * 1000 + high) * 2654435761 % 2**32
        return hashed * HELD_OUT_ONE_IN < 2**32


def sample_problems(count: int, seed: int, held_out: bool = False) -> list[Problem]:
    """Draw `count` problems from one split, uniformly with replacement.

    The same seed gives the same problems.
    """
    generator = random.Random(seed)
    problems: list[Problem] = []
    while len(problems) < count:
        left = generator.randint(SMALLEST, LARGEST)
        right = generator.randint(SMALLEST, LARGEST)
        problem = Problem(left, right)
        if problem.held_out == held_out:
            problems.append(problem)
    return problems


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a character-level tokenizer in Hugging Face's format.

    TRL, vLLM and llm-compressor can all load it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [PAD, END, *CHARACTERS]
    symbols += [f"<unused{index}>" for index in range(VOCABULARY_SIZE - len(symbols))]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # Set unk_token: for a Qwen2, loaders would otherwise add one whose id exceeds the embedding.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=PAD, padding_side="left"
    )


def encode_problems(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Encode prompts and answers as one tensor of token ids, (B, P + A).

    The last column is the end token.
    """
    import torch

    texts = [problem.prompt + problem.answer + tokenizer.eos_token for problem in problems]
    return torch.tensor(tokenizer(texts)["input_ids"])  # (B, P + A)


def build_dataset(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Build a dataset with `prompt`, a text, and `answer_ids`, the `A` tokens of the answer."""
    from datasets import Dataset

    prompts = [problem.prompt for problem in problems]
    answers = encode_problems(problems, tokenizer)[:, PROMPT_TOKENS:].tolist()
    return Dataset.from_dict({"prompt": prompts, "answer_ids": answers})


def exact_match(
    completion_ids: list[list[int]], answer_ids: list[list[int]], **kwargs: object
) -> list[float]:
    """Reward function: 1 for exactly the correct tokens, including the end token, else 0.

    Compares token ids because decoded text drops special tokens: `43<pad>21` would read as `4321`.
    """
    return [
        float(list(tokens) == list(answer))
        for tokens, answer in zip(completion_ids, answer_ids, strict=True)
    ]
