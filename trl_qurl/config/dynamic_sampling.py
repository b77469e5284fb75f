"""Settings of DAPO's dynamic sampling, which make sense for trainers that sample groups."""

from dataclasses import dataclass
from typing import Any

from trl_qurl.config.help import with_help


@with_help
@dataclass
class DynamicSamplingSettings:
    """
    A mixin for a config of TRL: the settings of dynamic sampling.

    Groups whose rewards are all equal have no advantage and teach nothing. With dynamic sampling they are replaced by
    groups of other prompts until the batch is full, as in DAPO (arXiv:2503.14476, Eq. 11).

    > Dynamic sampling

    Args:
        dynamic_sampling: Whether groups whose rewards are all equal are replaced by groups of other prompts.
        dynamic_sampling_max_rounds: Rounds of generation for one batch, the first one included. If they do not fill
            it, it is used as it is.
        dynamic_sampling_reward: Name of the reward function that decides; by default the weighted sum of all. Name one
            where another would always make a difference, as a penalty for length does.

    Raises:
        ValueError: No round to generate in, or a reward function is named without dynamic sampling.
    """

    dynamic_sampling: bool = False
    dynamic_sampling_max_rounds: int = 10
    dynamic_sampling_reward: str | None = None

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
