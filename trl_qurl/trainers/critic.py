"""PPO's critic: a value model that trains along with the policy, and its optimizer.

It has a separate `Accelerator`. The two share the process group and every setting, but each has its own models and
optimizers, so DDP, FSDP2 and ZeRO-3 prepare, clip and save the policy and the critic separately.

Shapes: `B` sequences, `P` prompt tokens, `T` completion tokens.
"""

import math
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, GradientAccumulationPlugin, is_peft_model
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from trl_qurl.config import QuRLPPOConfig
from trl_qurl.quantization.storage import new_directory

CRITIC_DIRECTORY = "critic"
"""Subdirectory for the critic, in the directory where `save_model` writes the policy."""

STATE_DIRECTORY = "critic_state"
"""Subdirectory for the critic, its optimizer and its schedule, in a checkpoint."""

OptimizerFactory = Callable[[torch.nn.Module], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]

ValueLossFunction = Callable[[torch.Tensor], torch.Tensor]
"""Maps a micro-batch's values, `(B, T + 1)`, to its share of an optimizer step's loss."""


class Critic:
    """A value model that learns after each backward pass of the policy.

    The trainer calls `rollout_values` per rollout, `learn` per micro-batch and `step` per optimizer step.
    `model(input_ids, attention_mask).logits` is `(B, P + T, 1)`.
    """

    def __init__(self, model: PreTrainedModel, args: QuRLPPOConfig, policy_accelerator: Accelerator) -> None:
        # Accelerators of a process share one `GradientState`: a plugin with other settings would change the policy's.
        plugin = GradientAccumulationPlugin(**policy_accelerator.gradient_state.plugin_kwargs)
        # Count optimizer steps, regardless of the number of processes, as the trainer's schedules do.
        accelerator = Accelerator(gradient_accumulation_plugin=plugin, step_scheduler_with_optimizer=False)
        self.model: Any = model  # `prepare` may wrap it for the launcher
        self.accelerator = accelerator
        self._args = args
        self._optimizer: Any = None
        self._scheduler: Any = None
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
            if is_peft_model(model):
                model.enable_input_require_grads()  # otherwise reentrant checkpointing would compute no gradients
        if accelerator.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            model.to(accelerator.device)

    def prepare(self, make_optimizer: OptimizerFactory, make_scheduler: SchedulerFactory) -> None:
        """Build the optimizer and schedule on the first call; training may start several times."""
        if self._optimizer is None:
            optimizer = make_optimizer(self.model)
            parts = self.accelerator.prepare(self.model, optimizer, make_scheduler(optimizer))
            self.model, self._optimizer, self._scheduler = parts

    @torch.no_grad()
    def rollout_values(self, batch: dict[str, Any], batch_size: int) -> torch.Tensor:
        """Return values before each token and after the last, `(B, T + 1)`, in passes of `batch_size` sequences."""
        ids, mask = prompts_and_completions(batch)
        chunks = zip(ids.split(batch_size), mask.split(batch_size), strict=True)
        return torch.cat([self.values(*chunk, batch["completion_ids"].size(1)) for chunk in chunks])

    def learn(self, batch: dict[str, Any], value_loss: ValueLossFunction) -> None:
        """Run forward and backward on a micro-batch, once the policy's pass has freed its activations."""
        self.backward(value_loss(self.values(*prompts_and_completions(batch), batch["completion_ids"].size(1))))

    def values(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_length: int) -> torch.Tensor:
        """Return values before each of `T` completion tokens and after the last, `(B, T + 1)`; ids: `(B, P + T)`."""
        self.model.train(torch.is_grad_enabled())  # gradient checkpointing needs train mode; dropout is off
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits.squeeze(-1)[:, -(completion_length + 1) :].float()

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients, and sum them over processes only at the last micro-batch of a step."""
        accelerator = self.accelerator
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            accelerator.backward(loss, scale_wrt_gas=False)  # the loss is already a mean over the whole step
            return
        with nullcontext() if accelerator.sync_gradients else accelerator.no_sync(self.model):
            accelerator.backward(loss)

    def step(self) -> dict[str, float]:
        """Clip, update and clear gradients; return the norm before clipping and the learning rate used."""
        norm = self._clip(self._args.max_grad_norm or math.inf)  # 0 disables clipping, as for the policy
        learning_rate = self._scheduler.get_last_lr()[0]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return {"critic/grad_norm": norm, "critic/learning_rate": learning_rate}

    def _clip(self, largest: float) -> float:
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), largest)
        if norm is None:
            return float("nan")
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)  # FSDP2 shards it

    def save_pretrained(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a token classifier that transformers can load."""
        state = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            with new_directory(directory) as tmp:
                self.accelerator.unwrap_model(self.model).save_pretrained(tmp, state_dict=state)
                tokenizer.save_pretrained(tmp)

    def save_state(self, checkpoint: Path) -> None:
        """Add the model, optimizer and schedule to a checkpoint, renamed into place once complete."""
        final, tmp = checkpoint / STATE_DIRECTORY, checkpoint / f".{STATE_DIRECTORY}"
        self.accelerator.save_state(str(tmp))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            if final.exists():  # left by an earlier run that reached this step in the same directory
                shutil.rmtree(final)
            os.replace(tmp, final)
        self.accelerator.wait_for_everyone()

    def load_state(self, checkpoint: Path) -> None:
        """Load what `save_state` wrote.

        Raises:
            FileNotFoundError: The checkpoint does not contain a critic.
        """
        state = checkpoint / STATE_DIRECTORY
        if not state.exists():
            raise FileNotFoundError(
                f"The checkpoint {checkpoint} has no {state.name}: it is incomplete or from another trainer. "
                "Resume from an earlier checkpoint, or start a new run from its model."
            )
        # Load via the CPU: torch cannot load directly to "cpu:0", the device of processes in a distributed CPU run.
        self.accelerator.load_state(str(state), map_location="cpu")


def prompts_and_completions(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask of a trainer's batch, both `(B, P + T)`."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def build_optimizer(model: torch.nn.Module, args: QuRLPPOConfig, decayed: set[str]) -> torch.optim.Optimizer:
    """Build an optimizer with the policy's settings (`optim`, betas, weight decay) and the critic's learning rate.

    Weight decay applies to the parameters named in `decayed`.
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
    """Raise `ValueError` for optimizers that choose their own parameters and so cannot serve a second model."""
    message = f"optim={args.optim!r} does not work with a critic: use 'adamw_torch_fused'."
    try:
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
    except ValueError as error:  # none of its target modules is in the critic
        raise ValueError(f"{message} transformers reports: {error}") from error
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    if not is_class or kwargs.keys() & {"params", "model", "optimizer_dict"}:
        raise ValueError(message)
