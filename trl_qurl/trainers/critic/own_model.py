"""A critic with a model of its own.

It has an `Accelerator` of its own beside the policy's: both share the process group and every setting, and each keeps
its own models and optimizers, so that DDP, FSDP2 and ZeRO-3 prepare, clip and save the two models apart.
"""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, GradientAccumulationPlugin, is_peft_model
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_qurl.config import QuRLPPOConfig
from trl_qurl.quantization.storage import new_directory
from trl_qurl.trainers.critic.critic import Critic, PolicyPass, ValueLossFunction, require_state

STATE_DIRECTORY = "critic_state"
"""Where a checkpoint keeps what a resumed run needs: critic, optimizer and schedule."""


class OwnModelCritic(Critic):
    """A critic with a model of its own, which learns after each backward pass of the policy.

    `model(input_ids, attention_mask).logits` is `(B, L, 1)`.
    """

    def __init__(self, model: PreTrainedModel, args: QuRLPPOConfig, policy_accelerator: Accelerator) -> None:
        # `GradientState` is one for all accelerators of a process: a plugin with other settings would change both.
        plugin = GradientAccumulationPlugin(**policy_accelerator.gradient_state.plugin_kwargs)
        # The trainer's schedules count optimizer steps, whatever the number of processes; so does this one.
        accelerator = Accelerator(gradient_accumulation_plugin=plugin, step_scheduler_with_optimizer=False)
        super().__init__(model, args, accelerator)
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
            if is_peft_model(model):
                model.enable_input_require_grads()  # else reentrant checkpointing finds nothing to train
        if accelerator.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            model.to(accelerator.device)

    def _wrap(self) -> None:
        parts = self.accelerator.prepare(self.model, self._optimizer, self._scheduler)
        self.model, self._optimizer, self._scheduler = parts

    @torch.no_grad()
    def rollout_values(self, batch: dict[str, Any], batch_size: int, seen: PolicyPass) -> torch.Tensor:  # noqa: D102
        ids, mask = prompts_and_completions(batch)
        chunks = zip(ids.split(batch_size), mask.split(batch_size), strict=True)
        return torch.cat([self.values(*chunk, batch["completion_ids"].size(1)) for chunk in chunks])

    def learn(self, batch: dict[str, Any], value_loss: ValueLossFunction) -> None:
        """Forward and backward pass on a micro-batch, after the policy's, whose activations are gone by then."""
        self.backward(value_loss(self.values(*prompts_and_completions(batch), batch["completion_ids"].size(1))))

    def values(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_length: int) -> torch.Tensor:
        """Values before each of `T` completion tokens and after them, `(B, T + 1)`, from ids of `(B, P + T)`."""
        self.model.train(torch.is_grad_enabled())  # checkpointing works in this mode only; there is no dropout
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits.squeeze(-1)[:, -(completion_length + 1) :].float()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the loss's gradients; they are summed over processes with the last micro-batch of a step only."""
        accelerator = self.accelerator
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            accelerator.backward(loss, scale_wrt_gas=False)  # the loss is a mean over the whole step already
            return
        with nullcontext() if accelerator.sync_gradients else accelerator.no_sync(self.model):
            accelerator.backward(loss)

    def _clip(self, largest: float) -> float:
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), largest)
        if norm is None:
            return float("nan")
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)  # FSDP2 keeps it in parts

    def save_pretrained(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a token classifier that transformers loads."""
        state = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            with new_directory(directory) as draft:
                self.accelerator.unwrap_model(self.model).save_pretrained(draft, state_dict=state)
                tokenizer.save_pretrained(draft)

    def save_state(self, checkpoint: Path) -> None:  # noqa: D102
        final, draft = checkpoint / STATE_DIRECTORY, checkpoint / f".{STATE_DIRECTORY}"
        self.accelerator.save_state(str(draft))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            if final.exists():  # of an earlier run that came to this step in the same directory
                shutil.rmtree(final)
            os.replace(draft, final)
        self.accelerator.wait_for_everyone()

    def load_state(self, checkpoint: Path) -> None:  # noqa: D102
        state = require_state(checkpoint / STATE_DIRECTORY)
        # Via the CPU: torch cannot load straight to "cpu:0", the device of one process among several on CPU.
        self.accelerator.load_state(str(state), map_location="cpu")


def prompts_and_completions(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of a trainer's batch, both `(B, P + T)`."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
