"""Can this policy be trained, quantized and tokenized for, and is the output directory free?"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainingArguments

from trl_qurl.rollout.checks.prompts import check_special_tokens
from trl_qurl.rollout.group import TOGETHER
from trl_qurl.trainers.callbacks import RolloutCallback
from trl_qurl.trainers.checks.arguments import check_adapter, check_full_precision
from trl_qurl.trainers.run_log import check_unused


class PolicyCheck(RolloutCallback):
    """Callback that raises for a policy that cannot be trained on quantized rollouts."""

    def on_arguments(self, args: TrainingArguments, arguments: dict[str, Any]) -> None:
        """Raise for an adapter or an output directory that cannot be used."""
        check_adapter(arguments["model"], arguments.get("peft_config"))
        directory = Path(args.output_dir or ".")
        TOGETHER.from_main(lambda: check_unused(directory))

    def on_models(self) -> None:
        """Raise for a policy that is quantized, frozen or cannot be saved, or a wrong tokenizer."""
        trainer = self.trainer
        check_full_precision(trainer.model)
        check_trainable(trainer.model, "The policy")
        if trainer.model.generation_config is not None:
            # Or transformers' error would end the run at its first checkpoint.
            trainer.model.generation_config.validate(strict=True)
        # A processor has a tokenizer.
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        check_special_tokens(tokenizer, trainer.model.config.get_text_config().vocab_size)


def check_trainable(model: PreTrainedModel, name: str) -> None:
    """Raise `ValueError`, with the name, if training would change no tensor of a model."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    way = "call model.requires_grad_(True) (PEFT leaves a model frozen after merge_and_unload)"
    if any(hasattr(module, "base_layer") for module in model.modules()):  # of an adapter
        way = (
            "load the adapter with PeftModel.from_pretrained(..., is_trainable=True), or set "
            "inference_mode=False"
        )
    raise ValueError(f"{name} has no trainable parameter, so no update would change it: {way}.")
