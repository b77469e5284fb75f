"""Configuration of RLOO on quantized rollouts: TRL's, plus rollouts and objective."""

from dataclasses import dataclass

from trl import RLOOConfig

from trl_qurl.config.checks.values import check_choice
from trl_qurl.config.help import with_help
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.objective import OBJECTIVES, TRL_LOSS


@with_help
@dataclass
class QuRLRLOOConfig(QuantizedRolloutsConfig, RLOOConfig):
    """[`~trl.RLOOConfig`] plus the objective and the settings of [`QuantizedRolloutsConfig`].

    Only new fields are listed. Settings that conflict raise `ValueError`.

    > Objective

    Args:
        objective: `tis` (FlashRL, Eq. 5), `decoupled` (Eq. 4), `quantized_ratio` (Eq. 3) and
            `naive` (Eq. 1), as for GRPO, or `trl`, TRL's own loss without a correction. `acr` is
            rejected: it lifts the clip bounds of single tokens, but RLOO clips one ratio per
            completion.
    """

    objective: str = "tis"

    def __post_init__(self) -> None:
        per_completion = [
            name for name, objective in OBJECTIVES.items() if not objective.lifts_upper_bound
        ]
        check_choice(self, "objective", (*per_completion, TRL_LOSS))
        super().__post_init__()
