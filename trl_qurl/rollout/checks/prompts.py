"""Prompts in tokens: whether there is room to continue them, and the model knows their tokens."""

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

logger = get_logger(__name__)  # of the main process

LENGTH = "vllm_max_model_length; of a server, --max-model-len"


def check_room(
    longest: int, context: int, limit: int, name: str = "A prompt", setting: str = LENGTH
) -> None:
    """Raise `ValueError` if a prompt fills the context; warn if its completion may end early.

    Args:
        longest: Tokens of the longest prompt.
        context: Tokens of a prompt and its completion together.
        limit: Tokens of the longest completion.
        name: What the message calls the prompt.
        setting: What sets the context.
    """
    both = f"the context of {context} tokens ({setting})"
    if longest >= context:
        raise ValueError(
            f"{name} of {longest} tokens fills {both}: enlarge it, or remove long prompts."
        )
    if longest + limit > context:
        logger.warning_once(
            f"Long prompts end completions before max_completion_length={limit}, because both "
            f"share {both}."
        )


def longest_of_all(prompts: list[list[int]]) -> int:
    """Return the tokens of the longest prompt of any process. A collective operation."""
    lengths: list[int] = gather_object([max(map(len, prompts), default=0)])
    return max(lengths)


def check_prompts(
    prompts: list[list[int]], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check the tokens of prompts by a model's config."""
    rows = config.get_text_config().vocab_size
    for prompt in prompts:
        check_tokens(prompt, rows, tokenizer)


def check_tokens(
    prompt: list[int], rows: int, tokenizer: PreTrainedTokenizerBase, name: str = "A prompt"
) -> None:
    """Raise `ValueError` for a prompt without tokens, or with one that the model does not know.

    `rows` is the number of rows of the model's embedding.
    """
    if not prompt:
        raise ValueError(
            f"{name} has no tokens, so there is nothing to continue: remove it from the dataset."
        )
    check_row(max(prompt), rows, tokenizer, f"a token of {name[0].lower()}{name[1:]}")


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Raise `ValueError` if the model does not know the padding or end token.

    Each rollout uses these. Other tokens may be missing as long as no prompt has them: some models
    have a larger tokenizer than embedding.
    """
    for kind, number in (("padding", tokenizer.pad_token_id), ("end", tokenizer.eos_token_id)):
        if number is not None:
            check_row(number, rows, tokenizer, f"the tokenizer's {kind} token")


def check_row(number: int, rows: int, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise `ValueError` for a token's number that is not one of an embedding's rows."""
    if number < rows:
        return
    token = tokenizer.convert_ids_to_tokens(number)
    raise ValueError(
        f"{token!r}, {name}, has the number {number}, but the model's embedding has only {rows} "
        "rows: load the model, call model.resize_token_embeddings(len(tokenizer)), and pass that "
        "model; or use the tokenizer it came with."
    )
