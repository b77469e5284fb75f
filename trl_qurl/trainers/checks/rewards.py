"""A note for errors of reward functions: the arguments that they get, and the result."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explained_rewards(names: list[str]) -> Iterator[None]:
    """Add to an error inside the block what TRL passes to reward functions and takes from them."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        error.add_note(
            f"Reward functions ({', '.join(names)}) are given the columns of the dataset by name "
            "(none of them with remove_unused_columns=True): accept **kwargs for the rest. They "
            "return a number, or None, for each completion."
        )
        raise
