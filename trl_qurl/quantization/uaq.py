"""Update-aware quantization (UAQ): smaller weights, which make updates relatively larger.

The function stays the same. The linear layers that a norm feeds are divided by s once, before
training. The rounding step of their weights is then s times finer, and so is the threshold that an
update must exceed to change a code. Layers without a norm before them (o_proj, down_proj), the
embedding and the head stay as they are. `architectures` lists the supported models.
"""

import math
import warnings
from typing import NamedTuple

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel

from trl_qurl.quantization.architectures import decoder_layers
from trl_qurl.quantization.checkpoint_form import whole
from trl_qurl.quantization.checks.uaq import checked_weight


def recorded_scale(model: PreTrainedModel) -> float:
    """Return the scale recorded in a model's config.

    Args:
        model: A model, scaled or not.

    Returns:
        The factor s; 1.0 for an unscaled model.
    """
    return getattr(model.config, "uaq_scale", 1.0)


def scale_model_(model: PreTrainedModel, scale: float) -> bool:
    """Scale a model in place without changing its function, and record the scale in its config.

        W ← W / s,    g ← s · g

    Where g is the gain of the norm that feeds W. Biases do not change: (W / s)(s x) + b = W x + b.
    `save_pretrained` keeps the record, so a saved model is not scaled twice. Models that share a
    config object share the record. In float32 the function is unchanged up to rounding. In bfloat16
    and float16 the rounding is not small: this warns. Source: Eq. 10-12, Fig. 5.

    Args:
        model: A model of a type in `ARCHITECTURES`, whole or without its head.
        scale: The factor s; the paper's best is 1.5 (Table 4).

    Returns:
        True if the model was scaled, False if it already had this scale.

    Raises:
        ValueError: If the scale is not finite and above 0, the model has another scale or an
            unknown type, or one of its layers is not a plain linear layer in memory. Nothing is
            changed then.
    """
    if not (0 < scale < math.inf):
        raise ValueError(
            f"Got UAQ scale {scale}. It must be finite and above 0; 1.0 turns UAQ off."
        )
    recorded = recorded_scale(model)
    if recorded == scale:
        return False
    if recorded != 1.0:
        raise ValueError(
            f"Got UAQ scale {scale}, but the model was already scaled by {recorded} "
            f"(config.uaq_scale). Keep uaq_scale={recorded}, or load the unscaled model."
        )
    for norm, linears, offset in _scalable_groups(model, scale):
        with torch.no_grad(), whole([norm, *linears]):
            for weight in linears:
                weight.div_(scale)
            norm.mul_(scale).add_((scale - 1.0) * offset)  # s · (offset + w) − offset
    model.config.uaq_scale = float(scale)
    return True


class _Group(NamedTuple):
    """A norm, and the linear layers that it feeds."""

    norm: torch.Tensor  # its weight
    linears: tuple[torch.Tensor, ...]  # their weights
    offset: float  # of the norm's gain, which is offset + weight


def _scalable_groups(model: PreTrainedModel, scale: float) -> list[_Group]:
    """Return what to scale, after checking all of it. Warns if rounding will not be small."""
    if is_peft_model(model):
        raise ValueError(
            "Got a PEFT model. An adapter trained on the scaled base does not fit the unscaled "
            "base that it is later loaded on. Set uaq_scale=1.0, or scale and save the base first "
            "and train the adapter on that copy."
        )
    (feeds, offset), layers = decoder_layers(model, "UAQ", "Set uaq_scale=1.0 to train without it.")
    modules = dict(model.named_modules())
    groups = []
    dtypes: set[torch.dtype] = set()
    for path in layers:
        for norm, linears in feeds.items():
            gain = checked_weight(modules, f"{path}.{norm}", nn.Module)
            weights = tuple(
                checked_weight(modules, f"{path}.{linear}", nn.Linear) for linear in linears
            )
            dtypes.update(weight.dtype for weight in (gain, *weights))
            groups.append(_Group(gain, weights, offset))
    halves = dtypes & {torch.bfloat16, torch.float16}
    is_power_of_two = math.frexp(scale)[0] == 0.5
    if halves and (offset or not is_power_of_two):
        warnings.warn(
            f"UAQ with scale {scale} rounds {', '.join(sorted(map(str, halves)))} weights: the "
            "model is no longer exactly the same function. Load it in float32 "
            '(model_init_kwargs={"dtype": "float32"}). If its norms multiply by their plain '
            "weight, a power of two is exact, too.",
            stacklevel=3,
        )
    return groups
