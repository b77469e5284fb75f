"""Models with recurrent layers, which syncs may not update."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RELOADABLE = ("qwen3_5_text",)
"""Recurrent models (`model_type`) for which an engine after training matched a fresh one."""


def check_recurrent_layers(model: "PreTrainedModel") -> None:
    """Raise `ValueError` for recurrent layers.

    After vLLM's reload, Mamba 2 computes with other weights.
    """
    config = model.config.get_text_config()
    is_recurrent = model._is_stateful or "conv" in (getattr(config, "layer_types", None) or ())
    if is_recurrent and config.model_type not in RELOADABLE:
        raise ValueError(
            f"{type(model).__name__} has recurrent layers (Mamba, linear attention, convolutions), "
            "and no sync is known to update them correctly: use a model without such layers (or "
            "Qwen 3.5), or TRL's own trainer with use_vllm=False."
        )
