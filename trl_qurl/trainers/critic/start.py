"""Where a critic starts: its model before the engine is up, and the critic itself afterwards."""

from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

from trl_qurl.config import QuRLPPOConfig
from trl_qurl.trainers.critic.critic import Critic, check_optimizer
from trl_qurl.trainers.critic.own_model import OwnModelCritic
from trl_qurl.trainers.critic.shared_backbone import SharedBackboneCritic, check_shared
from trl_qurl.trainers.critic.value_model import (
    build_value_model,
    critic_init_kwargs,
    policy_start,
    policy_tokenizer,
)


def load_critic_model(
    args: QuRLPPOConfig,
    policy: str | PreTrainedModel,
    processing_class: Any,
    value_model: str | PreTrainedModel | None,
    value_peft_config: Any,
) -> PreTrainedModel | None:
    """Check what the user asked for, and load the critic's model, before the slow start of an engine.

    Args:
        args: Of the trainer.
        policy: The trainer's `model`.
        processing_class: The trainer's.
        value_model: The trainer's.
        value_peft_config: The trainer's.

    Returns:
        The model; `None` for a critic on the policy's backbone.

    Raises:
        TypeError: `value_model` is a model without a value per token.
        ValueError: The critic cannot read the policy's tokens, or settings exclude each other.
    """
    if args.share_backbone:
        check_shared(args, value_model, value_peft_config)
        return None
    source = policy_start(policy) if value_model is None else value_model
    tokenizer = policy_tokenizer(policy, args, processing_class)
    model = build_value_model(source, tokenizer, critic_init_kwargs(args), value_peft_config)
    check_optimizer(args, model)
    return model


def start_critic(
    args: QuRLPPOConfig,
    policy: PreTrainedModel,
    accelerator: Accelerator,
    model: PreTrainedModel | None,
    saved_head: str | None,
) -> Critic:
    """The critic of a trainer.

    Args:
        args: Of the trainer.
        policy: Its model.
        accelerator: Its accelerator.
        model: What `load_critic_model` returned.
        saved_head: Directory with a head to start from, for a critic on the policy's backbone.
    """
    if model is not None:
        return OwnModelCritic(model, args, accelerator)
    critic = SharedBackboneCritic(policy, args, accelerator)
    if saved_head is not None:
        critic.load_head(saved_head)
    return critic
