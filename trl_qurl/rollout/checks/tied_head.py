"""Policies that an engine cannot hold: it ties an output head and an embedding."""

from torch import nn
from transformers import PreTrainedModel


def check_tied_head(model: PreTrainedModel) -> None:
    """Raise `ValueError` for a tied head and embedding that the policy trains apart."""
    tied = model.all_tied_weights_keys
    if vars(model.config).get("tie_word_embeddings") and tied:
        head = model.get_output_embeddings()
        embedding = model.get_input_embeddings()
        is_apart = _trained_of(head) != _trained_of(embedding)
        if is_apart or head.weight is not embedding.weight:
            first, second = next(iter(tied.items()))
            raise ValueError(
                f"{first} and {second} are one tensor in the engine (tie_word_embeddings), but the "
                "policy trains them apart: leave both modules out of target_modules and "
                "modules_to_save, or save both with ensure_weight_tying=True, or untie the model "
                "first."
            )


def _trained_of(module: nn.Module) -> set[nn.Parameter]:
    """Return what is trained of a head or embedding, apart from a bias.

    That is the module's weight, an adapter, or a copy (`modules_to_save`).
    """
    return {
        parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name != "bias"
    }
