"""Configuration of PPO: GRPO's on quantized rollouts, plus advantages from a critic."""

from dataclasses import dataclass
from typing import Annotated

from trl_qurl.config.checks.conflicts import WITH_A_CRITIC
from trl_qurl.config.checks.values import COUNT, POSITIVE, SHARE, check_choice
from trl_qurl.config.grpo import QuRLGRPOConfig
from trl_qurl.config.help import with_help


@with_help
@dataclass
class QuRLPPOConfig(QuRLGRPOConfig):
    """[`QuRLGRPOConfig`] plus the settings of the critic.

    Only new fields and fields with a new default or meaning are listed. Defaults marked "verl" come
    from verl, the framework of the paper's PPO run.

    > Advantages

    Args:
        gamma: Discount γ per token, in [0, 1] (verl). Below 1, early tokens of a long answer see
            little of its reward.
        gae_lambda: λ of generalized advantage estimation (verl): 1 trusts the rewards, 0 the
            critic.

    > Critic

        value_clip_range: How far a value may move from its rollout-time estimate before its loss is
            clipped, in units of reward (verl). `None` for no clipping.
        critic_warmup_steps: Number of initial optimizer steps in which only the critic learns. The
            policy's schedule counts them. Under DeepSpeed, `weight_decay` acts on the policy all
            the same.
        critic_learning_rate: Constant learning rate of the critic, as in the paper's GSM8K run and
            verl.

    > Changed defaults

        num_generations: Completions per prompt, at least 1: a critic needs no group.
        scale_rewards: TRL's scaling of rewards within groups; only `none` works with a critic.

    The critic shares all other settings with the policy: optimizer, betas, weight decay (`optim`,
    `adam_beta1`, ...), `max_grad_norm`, `gradient_checkpointing`, `model_init_kwargs`.
    """

    num_generations: int = 1
    scale_rewards: str = "none"

    # Advantages
    gamma: Annotated[float, SHARE] = 1.0
    gae_lambda: Annotated[float, SHARE] = 1.0

    # Critic
    value_clip_range: Annotated[float | None, POSITIVE] = 0.5
    critic_warmup_steps: Annotated[int, COUNT] = 0
    critic_learning_rate: Annotated[float, POSITIVE] = 1e-5

    def __post_init__(self) -> None:
        generations = self.num_generations
        if generations == 1:
            # TRL refuses groups of one, but a critic needs no groups: let TRL check the batch sizes
            # for another size.
            self.num_generations_eval = self.num_generations_eval or 1  # type: ignore[has-type]
            self.num_generations = max(self.per_device_train_batch_size, 2)
        super().__post_init__()
        self.num_generations = generations
        for name, fitting in WITH_A_CRITIC.items():
            check_choice(self, name, fitting, " with a critic")
