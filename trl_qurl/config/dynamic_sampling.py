"""Settings of DAPO's dynamic sampling, apart from the rest because they make sense for groups only."""

from dataclasses import dataclass, field


@dataclass
class DynamicSamplingSettings:
    r"""
    Groups whose rewards are all equal have no advantage and teach nothing. With dynamic sampling they are replaced by
    groups of other prompts until the batch is full, as in DAPO (arXiv:2503.14476, Eq. 11).

    Args:
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Whether to replace them.
        dynamic_sampling_max_rounds (`int`, *optional*, defaults to `10`):
            Rounds of generation for one batch, the first one included. If they do not fill it, it is used as it is.
        dynamic_sampling_reward (`str` or `None`, *optional*):
            Name of the reward function that decides, where the sum of several would: a punishment for length makes the
            rewards of wrong answers differ. `None` for the weighted sum.

    Raises:
        ValueError: No round to generate in, or a reward function is named without dynamic sampling.
    """

    dynamic_sampling: bool = field(
        default=False, metadata={"help": "Whether groups whose rewards are all equal are replaced by other prompts'."}
    )
    dynamic_sampling_max_rounds: int = field(
        default=10, metadata={"help": "Rounds of generation for one batch, the first one included."}
    )
    dynamic_sampling_reward: str | None = field(
        default=None, metadata={"help": "Reward function by which groups are judged; default: the weighted sum."}
    )

    def check_dynamic_sampling(self) -> None:
        """Refuse what cannot work.

        Raises:
            ValueError: As the class says.
        """
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
