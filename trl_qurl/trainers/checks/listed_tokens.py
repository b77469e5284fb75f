"""Says where a trainer's log-probabilities cannot follow `top_k`, `top_p` and `min_p`."""

import warnings
from typing import Any

from trl.distributed import DistributedBackend

from trl_qurl.config.checks.sampling import cutting_settings
from trl_qurl.quantization.checkpoint_form import plain_model

# Settings of transformers' models that change what the head computes.
AFTER_HEAD = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)


def warn_of_cuts(args: Any, obstacle: str) -> None:
    """Warn of the settings of a config that cut tokens, if there are any; say why it matters."""
    named = ", ".join(f"{name}={value}" for name, value in cutting_settings(args).items())
    if named:
        warnings.warn(
            f"{named}: the engine's log-probabilities account for this, but the trainer's cover "
            f"the whole vocabulary, because {obstacle}. The importance ratio is therefore too "
            "small, and the mismatch/* metrics and every correction are wrong. Set top_k=0, "
            "top_p=1.0, min_p=None, and no structured outputs, also in generation_kwargs.",
            stacklevel=2,
        )


def obstacle_of(trainer: Any) -> str | None:
    """Return why the policy's log-probabilities cannot follow the engine's lists, if they can't."""
    for name in ("tools", "rollout_func", "environment_factories"):
        if getattr(trainer, name, None):
            return f"{name} may put a completion together from several answers"
    if trainer.args.torch_compile:
        return "nobody has tried it with torch_compile"
    if DistributedBackend(trainer.accelerator).is_zero3:
        return "ZeRO-3 splits the head"
    config = plain_model(trainer.model).config
    if config.get_text_config() is not config:
        return "the model takes images"
    for name in AFTER_HEAD:
        if getattr(config, name, None) not in (None, 1.0):
            return f"the model has {name}"
    return None
