"""The critic in training: a model of its own, its optimizer and its schedule.

It has an `Accelerator` of its own beside the policy's: both share the process group and every setting, and each keeps
its own models and optimizers, so that DDP, FSDP2 and ZeRO-3 prepare, clip and save the two models apart.

Shapes: `B` sequences, `P` prompt tokens, `T` completion tokens.
"""

import math
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, GradientAccumulationPlugin, is_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from trl_qurl.config import QuRLPPOConfig
from trl_qurl.quantization.storage import new_directory

CRITIC_DIRECTORY = "critic"
"""Where `save_model` puts the critic, beside the policy's files."""

STATE_DIRECTORY = "critic_state"
"""Where a checkpoint keeps what a resumed run needs: critic, optimizer and schedule."""

OptimizerFactory = Callable[[torch.nn.Module], torch.optim.Optimizer]

SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

ValueLossFunction = Callable[[torch.Tensor], torch.Tensor]
"""From a micro-batch's values, `(B, T + 1)`, to its share of the loss of an optimizer step."""


class Critic:
    """
    A value model that learns beside the policy.

    Args:
        model: `model(input_ids, attention_mask).logits` is `(B, L, 1)`.
        args: Schedule, clipping and gradient checkpointing.
        policy_accelerator: The trainer's.
        make_optimizer: Builds the optimizer for a model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: QuRLPPOConfig,
        policy_accelerator: Accelerator,
        make_optimizer: OptimizerFactory,
    ) -> None:
        # `GradientState` is one for all accelerators of a process: a plugin with other settings would change both.
        plugin = GradientAccumulationPlugin(**policy_accelerator.gradient_state.plugin_kwargs)
        # The trainer's schedules count optimizer steps, whatever the number of processes; so does this one.
        self.accelerator = Accelerator(gradient_accumulation_plugin=plugin, step_scheduler_with_optimizer=False)
        self._args = args
        self._make_optimizer = make_optimizer
        self._optimizer: Any = None
        self._scheduler: Any = None
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
            if is_peft_model(model):
                model.enable_input_require_grads()  # else reentrant checkpointing finds nothing to train
        if self.accelerator.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            model.to(self.accelerator.device)
        self.model = model

    def prepare(self, make_scheduler: SchedulerFactory) -> None:
        """Wrap the model for the launcher and build optimizer and schedule; once, however often training starts."""
        if self._optimizer is not None:
            return
        optimizer = self._make_optimizer(self.model)
        scheduler = make_scheduler(optimizer)
        self.model, self._optimizer, self._scheduler = self.accelerator.prepare(self.model, optimizer, scheduler)

    def forget(self) -> None:
        """Nothing is kept of the policy's passes."""

    def watching(self) -> AbstractContextManager[None]:
        """The policy's passes are none of this critic's business."""
        return nullcontext()

    @torch.no_grad()
    def rollout_values(self, batch: dict[str, Any], batch_size: int) -> torch.Tensor:
        """Values of a whole rollout.

        Args:
            batch: Of the trainer, with prompts and completions.
            batch_size: Sequences at a time.

        Returns:
            `(B, T + 1)`: before each token and, in the last column, after them all.
        """
        ids, mask = prompts_and_completions(batch)
        chunks = zip(ids.split(batch_size), mask.split(batch_size), strict=True)
        return torch.cat([self.values(*chunk, batch["completion_ids"].size(1)) for chunk in chunks])

    def add_to_policy_loss(
        self, policy_loss: torch.Tensor, batch: dict[str, Any], value_loss: ValueLossFunction
    ) -> torch.Tensor:
        """The policy's loss as it is: this critic has a backward pass of its own."""
        return policy_loss

    def learn(self, batch: dict[str, Any], value_loss: ValueLossFunction) -> None:
        """Forward and backward pass on a micro-batch, after the policy's, whose activations are gone by then."""
        self.backward(value_loss(self.values(*prompts_and_completions(batch), batch["completion_ids"].size(1))))

    def values(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_length: int) -> torch.Tensor:
        """Values before each of `T` completion tokens and, in the last column, after them.

        Args:
            input_ids: `(B, P + T)`.
            attention_mask: `(B, P + T)`.
            completion_length: T.

        Returns:
            `(B, T + 1)`, float32, with gradients where they are enabled.
        """
        self.model.train(torch.is_grad_enabled())  # checkpointing works in this mode only; there is no dropout
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits.squeeze(-1)[:, -(completion_length + 1) :].float()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the loss's gradients; they are summed over processes with the last micro-batch of a step only."""
        accelerator = self.accelerator
        kwargs = {}
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            kwargs["scale_wrt_gas"] = False  # the loss is a mean over the whole step already
        later = accelerator.distributed_type != DistributedType.DEEPSPEED and not accelerator.sync_gradients
        with accelerator.no_sync(self.model) if later else nullcontext():
            accelerator.backward(loss, **kwargs)

    def step(self) -> dict[str, float]:
        """Clip, update and forget the gradients; norm before clipping, and the learning rate used."""
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), largest_norm(self._args))
        learning_rate = self._scheduler.get_last_lr()[0]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return {"critic/grad_norm": _to_float(norm), "critic/learning_rate": learning_rate}

    def save_pretrained(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a token classifier that transformers loads, and that `value_model` takes; call on every process."""
        state = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            with new_directory(directory) as draft:
                self.accelerator.unwrap_model(self.model).save_pretrained(draft, state_dict=state)
                tokenizer.save_pretrained(draft)

    def save_state(self, checkpoint: Path) -> None:
        """Add model, optimizer and schedule to a checkpoint; they get their name when they are complete."""
        final, draft = checkpoint / STATE_DIRECTORY, checkpoint / f".{STATE_DIRECTORY}"
        self.accelerator.save_state(str(draft))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            if final.exists():  # of an earlier run that came to this step in the same directory
                shutil.rmtree(final)
            os.replace(draft, final)
        self.accelerator.wait_for_everyone()

    def load_state(self, checkpoint: Path) -> None:
        """Read back what `save_state` wrote.

        Raises:
            FileNotFoundError: the checkpoint has no critic.
        """
        state = require_state(checkpoint / STATE_DIRECTORY)
        # By way of the CPU: torch cannot load straight to "cpu:0", the device of one process among several on CPU.
        self.accelerator.load_state(str(state), map_location="cpu")


def prompts_and_completions(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of a trainer's batch, both `(B, P + T)`."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def largest_norm(args: QuRLPPOConfig) -> float:
    """The norm at which gradients are clipped; infinite where the trainer does not clip."""
    return args.max_grad_norm or math.inf


def build_optimizer(model: torch.nn.Module, args: QuRLPPOConfig, decayed: set[str]) -> torch.optim.Optimizer:
    """The policy's kind of optimizer (`optim`, betas, weight decay) with the critic's learning rate.

    Args:
        model: Whose trainable parameters it updates.
        args: Settings of the trainer.
        decayed: Names of the parameters that weight decay applies to.
    """
    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for name, parameter in trained if name in decayed], "weight_decay": args.weight_decay},
        {"params": [parameter for name, parameter in trained if name not in decayed], "weight_decay": 0.0},
    ]
    kwargs["lr"] = args.critic_learning_rate
    return optimizer_class([group for group in groups if group["params"]], **kwargs)


def check_optimizer(args: QuRLPPOConfig, model: torch.nn.Module) -> None:
    """Refuse an optimizer that cannot be built for a second model.

    Raises:
        ValueError: it chooses its parameters itself.
    """
    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    if not is_class or kwargs.keys() & {"params", "model", "optimizer_dict"}:
        raise ValueError(
            f"optim={args.optim!r} chooses its parameters itself, which has no counterpart for the critic: use "
            "'adamw_torch_fused', or another optimizer that takes groups of parameters."
        )


def require_state(path: Path) -> Path:
    """The path, if it is there."""
    if not path.exists():
        raise FileNotFoundError(
            f"There is no {path.name} in {path.parent}: it was written by another trainer, with save_only_model=True "
            "or another share_backbone, or cut off. Resume from an earlier checkpoint, or start anew with its model."
        )
    return path


def _to_float(norm: Any) -> float:
    if norm is None:
        return float("nan")
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2 keeps it in parts
    return float(norm)
