"""The prompts of a trainer's datasets, all of them in tokens, checked before the engine starts.

A dataset that is streamed, transformed as it is read, or made by an environment or a `rollout_func`
is left out: what the engine will continue is not known yet. The backend checks each rollout's
prompts again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments

from trl_qurl.config.checks.values import check_choice
from trl_qurl.rollout.checks.prompts import check_room, check_tokens
from trl_qurl.trainers.callbacks import RolloutCallback
from trl_qurl.trainers.checks.arguments import check_arguments

logger = get_logger(__name__)  # of the main process

BATCH = 1_000  # prompts that are tokenized together
MEASURED = 100_000  # prompts of a dataset; 10,000 take about three seconds on two cores

Prompt = str | list[dict[str, Any]]  # a text, or messages


@dataclass(frozen=True)
class LongestPrompt:
    """The longest prompt of all datasets."""

    name: str = "no prompt"  # such as `train_dataset[15]`
    tokens: int = 0


class DataCheck(RolloutCallback):
    """Callback that raises for data that training cannot use."""

    def on_arguments(self, args: TrainingArguments, arguments: dict[str, Any]) -> None:
        """Raise for too few rows, or for what dynamic sampling cannot draw."""
        check_arguments(args, arguments)

    def on_models(self) -> None:
        """Measure the prompts; raise for one that a colocated engine has no room for."""
        self._longest = measure_prompts(self.trainer)
        args = self.trainer.args
        if vars(args).get("dynamic_sampling_reward"):
            check_choice(args, "dynamic_sampling_reward", self.trainer.reward_func_names)
        if args.vllm_mode == "colocate" and args.vllm_max_model_length:
            self._check_room(args.vllm_max_model_length)

    def on_engine(self) -> None:
        """Raise for a prompt that the engine has no room for."""
        self._check_room(self.trainer.vllm_generation.context)

    def _check_room(self, context: int) -> None:
        longest = self._longest
        if longest.tokens > 0:  # else no prompt is known yet
            name = f"The prompt {longest.name}"
            check_room(longest.tokens, context, self.trainer.max_completion_length or 1, name)


def measure_prompts(trainer: Trainer) -> LongestPrompt:
    """Return the longest prompt of a trainer's datasets.

    Raises `ValueError` for one without tokens, or with a token that the model does not know. Warns
    of prompts after which a completion is not the answer that the user has in mind.
    """
    longest = LongestPrompt()
    makes_prompts = vars(trainer).get("environment_factories") or vars(trainer).get("rollout_func")
    if trainer._is_vlm or makes_prompts:
        return longest
    rows = trainer.model.config.get_text_config().vocab_size
    for name, dataset in datasets_of(trainer).items():
        doubts: dict[str, list[int]] = {}
        for index, prompt, tokens in tokenized(trainer, name, dataset):
            check_tokens(tokens, rows, trainer._tokenizer, f"The prompt {name}[{index}]")
            if len(tokens) > longest.tokens:
                longest = LongestPrompt(f"{name}[{index}]", len(tokens))
            for doubt in doubts_of(prompt, tokens, trainer._tokenizer):
                doubts.setdefault(doubt, []).append(index)
        for doubt, indices in doubts.items():
            logger.warning(
                f"{len(indices)} prompts, the first of which is {name}[{indices[0]}], {doubt}"
            )
    return longest


def datasets_of(trainer: Trainer) -> dict[str, Dataset]:
    """Return the datasets whose prompts can be read now, by the names that messages call them."""
    evaluation = trainer.eval_dataset
    named = {"train_dataset": trainer.train_dataset}
    if isinstance(evaluation, dict):
        named |= {f"eval_dataset[{key!r}]": dataset for key, dataset in evaluation.items()}
    else:
        named["eval_dataset"] = evaluation
    return {
        name: dataset
        for name, dataset in named.items()
        if isinstance(dataset, Dataset) and len(dataset) and dataset.format["type"] is None
    }


def tokenized(
    trainer: Trainer, name: str, dataset: Dataset
) -> Iterator[tuple[int, Prompt, list[int]]]:
    """Yield the index, the prompt, and its tokens for each row, as the trainer will tokenize it.

    Raises `ValueError` for a row without a prompt.
    """
    prompts = dataset.select_columns("prompt")
    for start in range(0, min(len(prompts), MEASURED), BATCH):
        batch = prompts[start : min(start + BATCH, MEASURED)]["prompt"]
        for offset, prompt in enumerate(batch):
            if prompt is None or prompt == []:
                raise ValueError(
                    f"The prompt {name}[{start + offset}] is {prompt!r}: remove the row."
                )
        for offset, tokens in enumerate(trainer._tokenize_prompts(batch)[0]):
            yield start + offset, batch[offset], tokens


def doubts_of(
    prompt: Prompt, tokens: list[int], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Yield what may be wrong with a prompt, as the end of a sentence with the way out."""
    eos = tokenizer.eos_token
    bos = tokenizer.bos_token
    if isinstance(prompt, str):
        is_added = eos is not None and not prompt.endswith(eos)
        if is_added and len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id:
            yield (
                f"end with {eos!r}, which the tokenizer adds, so the policy would learn to go on "
                "after its end: load the tokenizer with add_eos_token=False, or change its "
                "post-processor."
            )
    elif prompt and prompt[-1].get("role") == "assistant":
        yield (
            "end with an assistant's turn, after which the chat template opens another one: remove "
            "the turn, because TRL does not continue it."
        )
    if bos is not None and tokens[:2] == [tokenizer.bos_token_id] * 2:
        yield (
            f"begin with two {bos!r}: leave the token out of the text, because the tokenizer or "
            "the chat template adds it, or pass messages instead of text made with "
            "apply_chat_template."
        )
