"""Settings of DAPO's dynamic sampling, which make sense for trainers that sample groups."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DynamicSamplingSettings:
    r"""
    A mixin for a config of TRL: the settings of dynamic sampling.

    Groups whose rewards are all equal have no advantage and teach nothing. With dynamic sampling they are replaced by
    groups of other prompts until the batch is full, as in DAPO (arXiv:2503.14476, Eq. 11).

    > Dynamic sampling

    Args:
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Whether to replace them.
        dynamic_sampling_max_rounds (`int`, *optional*, defaults to `10`):
            Rounds of generation for one batch, the first one included. If they do not fill it, it is used as it is.
        dynamic_sampling_reward (`str` or `None`, *optional*):
            Name of the reward function that decides. By default the weighted sum of all; name one where another would
            always make a difference, as a penalty for length does.

    Raises:
        ValueError: No round to generate in, or a reward function is named without dynamic sampling.
    """

    dynamic_sampling: bool = field(
        default=False,
        metadata={"help": "Whether groups whose rewards are all equal are replaced by groups of other prompts."},
    )
    dynamic_sampling_max_rounds: int = field(
        default=10, metadata={"help": "Rounds of generation for one batch, the first one included."}
    )
    dynamic_sampling_reward: str | None = field(
        default=None, metadata={"help": "Reward function by which groups are judged; default: the weighted sum."}
    )

    def __post_init__(self: Any) -> None:
        super().__post_init__()  # type: ignore[misc]  # TRL's config, which comes after this class
        if self.dynamic_sampling_max_rounds < 1:
            raise ValueError(
                f"dynamic_sampling_max_rounds is {self.dynamic_sampling_max_rounds}: give 1 or more rounds of "
                "generation (10 is usual), or set dynamic_sampling=False."
            )
        if self.dynamic_sampling_reward is not None and not self.dynamic_sampling:
            raise ValueError(
                f"dynamic_sampling_reward={self.dynamic_sampling_reward!r} judges nothing without dynamic sampling: "
                "set dynamic_sampling=True, or leave it out."
            )
