"""Trainer callbacks."""

import weakref
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from trl_qurl.quantization.experts import expert_layers
from trl_qurl.quantization.fake_quantization import forget_outdated, quantize_layers
from trl_qurl.quantization.layers import quantized_layer_names
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.uaq import recorded_scale, scale_model_
from trl_qurl.trainers.run_log import RUN_LOG, RunLog


class UpdateAwareQuantizationCallback(TrainerCallback):
    """A `TrainerCallback` that applies UAQ to the model once, when the trainer is built.

    Source: Eq. 10-12 of QuRL, arXiv:2602.13953; s = 1.5 is best in its Table 4.

    No model is scaled twice: its config records the scale, and a resumed run overwrites weights scaled at init with
    the checkpoint's scaled weights.

    Args:
        scale: The factor s applied to the norms' gains.
    """

    def __init__(self, scale: float = 1.5) -> None:
        self.scale = scale

    def on_init_end(self, *args: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        """Scale the model before it is wrapped, added to an optimizer or overwritten by a checkpoint."""
        scale_model_(model, self.scale)

    def on_train_begin(self, *args: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        """Raise `RuntimeError` if the model was never scaled."""
        if recorded_scale(model) != self.scale:
            raise RuntimeError(
                f"UAQ scale {self.scale} was requested, but the model being trained has scale "
                f"{recorded_scale(model)}. The callback runs when the trainer is built: pass it in callbacks=[...], "
                "and pass a model, not model_init."
            )


class QuantizedForwardCallback(TrainerCallback):
    """A `TrainerCallback` that switches models to the engine's quantized forward pass.

    Weights are rounded again whenever they change. The policy's config records the format as `training_forward`.

    Args:
        scheme: The rollouts' format.
        ignore: Modules kept in full precision.
    """

    def __init__(self, scheme: QuantizationScheme, ignore: list[str]) -> None:
        self._scheme, self._ignore = scheme, ignore

    def on_init_end(self, *args: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        """Switch the policy before it is wrapped."""
        state = AcceleratorState()
        if is_deepspeed_zero3_enabled() or (state.distributed_type == DistributedType.FSDP and not state.is_fsdp2):
            raise ValueError(
                "training_forward='quantized' does not work under FSDP 1 or ZeRO-3: use FSDP 2, DDP or ZeRO-2."
            )
        self.change(model)
        model.config.training_forward = {"scheme": self._scheme.name, "ignore": self._ignore}

    def change(self, model: PreTrainedModel) -> None:
        """Switch a model to the quantized forward pass.

        Args:
            model: The policy, or its reference model.

        Raises:
            ValueError: A layer is an expert or the output head, or cannot be stored in the format.
        """
        names = quantized_layer_names(model, self._ignore, self._scheme)
        if expert_layers(names):
            raise ValueError(
                "training_forward='quantized' has no gradient for rounded experts: add 're:.*\\.experts\\.' to "
                "quantization_ignore, or use training_forward='full_precision'."
            )
        layers = quantize_layers(model, names, self._scheme)
        if model.get_output_embeddings() in layers:
            raise ValueError(
                "training_forward='quantized' cannot round the output head, because TRL's loss uses its weight "
                "directly: keep 'lm_head' in quantization_ignore."
            )
        # Hook the decoder, because not all of TRL's losses call the model around it.
        model.get_decoder().register_forward_pre_hook(forget_outdated)


class TrainerAwareCallback(TrainerCallback):
    """Base class for callbacks that need their trainer, which transformers does not pass to them.

    trl-qurl's trainers set `trainer`. The reference is weak, so deleting a trainer frees its engine.
    """

    _trainer: weakref.ref | None = None

    @property
    def trainer(self) -> Any:
        """The trainer that this callback was passed to.

        Raises:
            RuntimeError: The callback was not passed to a trainer, or that trainer was deleted.
        """
        trainer = None if self._trainer is None else self._trainer()
        if trainer is None:
            name = type(self).__name__
            raise RuntimeError(f"{name} has no trainer: pass it in callbacks=[...] to a trl-qurl trainer.")
        return trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)


class CriticWarmupCallback(TrainerCallback):
    """A `TrainerCallback` that freezes the policy for the first optimizer steps, to let its critic learn first.

    The optimizer runs without gradients, so it changes no weights, builds no momentum and applies no weight decay.
    DeepSpeed steps before callbacks run. There, the trainer's zero loss freezes the policy, except for weight decay.

    Args:
        steps: Optimizer steps at the start of training.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, *, optimizer: Optimizer, **kwargs: Any
    ) -> None:
        """Clear the gradients."""
        if state.global_step < self.steps:
            optimizer.zero_grad()


class RunLogCallback(TrainerCallback):
    """A `TrainerCallback` that writes `run.jsonl`, the input of `trl-qurl report`, in the main process.

    Args:
        settings: Settings to write in addition to the trainer's arguments, by name.
    """

    def __init__(self, settings: dict[str, object] | None = None) -> None:
        self._settings = settings or {}
        self._log: RunLog | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: Any, *, model: PreTrainedModel, **kwargs: Any
    ) -> None:
        """Start the file in the output directory, or continue it after the step that training resumes from."""
        if state.is_world_process_zero:
            settings = {
                "model": getattr(model.config, "_name_or_path", None),
                **args.to_dict(),
                "uaq_scale": recorded_scale(model),
                **self._settings,
            }
            self._log = RunLog(Path(args.output_dir or ".") / RUN_LOG)
            self._log.begin(settings, state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: Any, *, logs: dict[str, float], **kwargs: Any) -> None:
        """Append the row, unless the trainer evaluates without having trained."""
        if self._log is not None:
            self._log.append({"step": state.global_step, **logs})
