"""Policies that an engine cannot hold as they are."""

from torch import nn
from transformers import PreTrainedModel


def check_policy(model: PreTrainedModel) -> None:
    """Raise `ValueError` for a policy that an engine cannot hold, or transformers would not save.

    An engine ties an output head and an embedding, even if the policy trains them apart. No model
    is saved with a wrong generation config, which otherwise ends a run at its first checkpoint.
    """
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
    if model.generation_config is not None:
        model.generation_config.validate(strict=True)


def _trained_of(module: nn.Module) -> set[nn.Parameter]:
    """Return what is trained of a head or embedding, apart from a bias.

    That is the module's weight, an adapter, or a copy (`modules_to_save`).
    """
    return {
        parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name != "bias"
    }
