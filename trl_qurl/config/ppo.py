"""Configuration of PPO: that of GRPO on quantized rollouts, plus advantages from a critic."""

import math
from dataclasses import dataclass

from trl_qurl.config.grpo import QuRLGRPOConfig
from trl_qurl.config.help import with_help


class _SingleGeneration(int):
    """
    One generation per prompt, for the length of `GRPOConfig`'s checks.

    They compare `num_generations` with something in one place only: to refuse less than two, of which a group's
    baseline cannot be made. A critic needs no group. All other checks see the number 1, and stay on.
    """

    def __lt__(self, other: object) -> bool:
        return False


@with_help
@dataclass
class QuRLPPOConfig(QuRLGRPOConfig):
    r"""
    [`QuRLGRPOConfig`] plus the settings of the critic. Only new fields, and those whose default or meaning changes,
    are listed.

    Defaults are those of verl, the framework of the paper's PPO run, where it has the setting (marked "verl").

    > Advantages

    Args:
        gamma: Discount γ per token, in [0, 1] (verl). Below 1, early tokens of a long answer see little of its reward.
        gae_lambda: λ of generalized advantage estimation (verl): 1 trusts the rewards, 0 the critic.
        whiten_advantages: Whether advantages get mean 0 and variance 1 over the tokens of the whole rollout, on all
            processes (verl).
        kl_in_reward: Whether `beta` weighs a penalty in each token's reward, β·(log π − log π_ref), in place of the KL
            term in the loss (Ziegler et al. 2019).

    > Critic

        share_backbone: Whether policy and critic share one backbone with two heads. That takes hardly more memory than
            the policy alone; the critic's loss then trains the policy's backbone as well.
        value_loss_coef: Weight of the value loss relative to the policy's, with `share_backbone` only (TRL's former
            PPO trainer).
        value_clip_range: How far a value may move from its estimate at rollout time before its loss is clipped, in
            units of reward (verl). `None` for no clipping.
        critic_warmup_steps: Optimizer steps at the start in which only the critic learns. The policy's schedule counts
            them.
        critic_learning_rate: Learning rate of the critic, constant as in verl (the paper's GSM8K run and verl). For a
            schedule, override `QuRLPPOTrainer.create_critic_scheduler`.

    > Changed defaults

        num_generations: Completions per prompt, from 1 up: a critic needs no group.
        scale_rewards: TRL's scaling of rewards within groups; only `none` fits a critic.

    Everything else of the critic follows the policy: optimizer, betas, weight decay (`optim`, `adam_beta1`, ...),
    `max_grad_norm`, `gradient_checkpointing`, `model_init_kwargs`.

    Raises:
        ValueError: Settings that cannot work together; the message names them and says what to change.
    """

    num_generations: int | None = 1
    scale_rewards: str = "none"

    # Advantages
    gamma: float = 1.0
    gae_lambda: float = 1.0
    whiten_advantages: bool = True
    kl_in_reward: bool = False

    # Critic
    share_backbone: bool = False
    value_loss_coef: float = 0.1
    value_clip_range: float | None = 0.5
    critic_warmup_steps: int = 0
    critic_learning_rate: float = 1e-5

    def __post_init__(self) -> None:
        self._check_critic()
        single = self.num_generations == 1
        if single:
            self.num_generations = _SingleGeneration(1)
        super().__post_init__()
        if single:
            self.num_generations = 1

    def _check_critic(self) -> None:
        if self.num_generations is None or self.num_generations < 1:
            raise ValueError(f"num_generations is {self.num_generations}: give 1 or more completions per prompt.")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be in [0, 1] (verl's setting is 1).")
        for name in ("critic_learning_rate", "value_loss_coef"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: give a positive number.")
        if self.critic_warmup_steps < 0:
            raise ValueError(
                f"critic_warmup_steps is {self.critic_warmup_steps}: give a number of optimizer steps, or 0 for none."
            )
        if self.value_clip_range is not None and not self.value_clip_range > 0:
            raise ValueError(
                f"value_clip_range is {self.value_clip_range}: give a positive distance in units of reward, or None "
                "for no clipping."
            )
        if self.kl_in_reward and self.beta == 0:
            raise ValueError(
                "kl_in_reward=True with beta=0 penalizes nothing: give beta the weight of the penalty (0.001 is "
                "usual), or set kl_in_reward=False."
            )
        if self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling=True replaces groups whose rewards are all equal, and with a critic there are no "
                "groups to judge: set it to False, or use QuRLGRPOTrainer."
            )
        if self.scale_rewards not in ("none", False):
            raise ValueError(
                f"scale_rewards={self.scale_rewards!r} scales rewards for a group's baseline, which the critic "
                "replaces: use 'none'; whiten_advantages scales the critic's advantages instead."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"multi_objective_aggregation={self.multi_objective_aggregation!r} normalizes rewards within groups, "
                "which the critic replaces: use 'sum_then_normalize', which sums them by their weights."
            )
