"""A critic that is one more head on the policy: hardly more memory, and one forward pass for both.

The head reads the hidden states that the policy's backbone computes anyway. It is one linear layer, so every process
keeps all of it, whatever the launcher does with the policy.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_qurl.config import QuRLPPOConfig
from trl_qurl.quantization.storage import new_directory
from trl_qurl.trainers.critic.critic import Critic, PolicyPass, ValueLossFunction, require_state

HEAD_FILE = "value_head.safetensors"
"""What `save_model` writes of a critic whose backbone is the policy's."""

STATE_FILE = "critic_state.pt"


class SharedBackboneCritic(Critic):
    """A value head on the policy's backbone, which learns in the policy's own backward pass."""

    def __init__(
        self, policy: PreTrainedModel, args: QuRLPPOConfig, accelerator: Accelerator, saved_head: str | None = None
    ) -> None:
        inner = policy.get_base_model() if is_peft_model(policy) else policy
        # Starts at zero, like the head of any critic here; float32, whatever the policy is trained in.
        head = nn.Linear(inner.config.get_text_config().hidden_size, 1, device=accelerator.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        super().__init__(head, args, accelerator)
        self._backbone = inner.base_model
        if saved_head is not None:
            path = _saved_head(saved_head)
            try:
                head.load_state_dict(load_file(path))
            except RuntimeError as error:
                raise ValueError(f"{path} was trained on a backbone of another width: {error}") from error

    @contextmanager
    def watching(self) -> Iterator[PolicyPass]:
        """Keep the hidden states of a pass with gradients, and the values of one without.

        The hidden states of a whole rollout would fill the memory.
        """
        seen: PolicyPass = []

        def see(backbone: nn.Module, inputs: Any, outputs: Any) -> None:
            hidden = outputs.last_hidden_state  # (b, P + T, H)
            seen.append(hidden if torch.is_grad_enabled() else self._head(hidden))

        # A hook that stays would keep the critic alive with the policy, and be copied with it.
        hook = self._backbone.register_forward_hook(see)
        try:
            yield seen
        finally:
            hook.remove()

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model(hidden.float()).squeeze(-1)  # (b, P + T)

    def rollout_values(self, batch: dict[str, Any], batch_size: int, seen: PolicyPass) -> torch.Tensor:
        """Values of a whole rollout, from the policy's pass over it."""
        return torch.cat(seen)[:, -(batch["completion_ids"].size(1) + 1) :]

    def add_to_policy_loss(
        self, policy_loss: torch.Tensor, batch: dict[str, Any], seen: PolicyPass, value_loss: ValueLossFunction
    ) -> torch.Tensor:
        """Add the value loss, whose gradient reaches the backbone through the policy's own backward pass.

        The head's part of the chain rule is computed here; what it hands on to the hidden states h is carried by
        (h · ∂L/∂h), a term with that gradient. So the head needs no place in the wrapped policy.
        """
        (hidden,) = seen  # (B, P + T, H)
        leaf = hidden.detach().requires_grad_()
        values = self._head(leaf[:, -(batch["completion_ids"].size(1) + 1) :])
        loss = self._args.value_loss_coef * value_loss(values)
        loss.backward()
        carrier = (hidden * leaf.grad).sum(dtype=torch.float32)  # type: ignore[operator]
        return policy_loss + carrier + (loss - carrier).detach()

    def _clip(self, largest: float) -> float:
        for parameter in self.model.parameters():
            parameter.grad = self.accelerator.reduce(parameter.grad, reduction="mean")
        return nn.utils.clip_grad_norm_(self.model.parameters(), largest).item()

    def save_pretrained(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the head only."""
        if self.accelerator.is_main_process:
            with new_directory(directory) as draft:
                save_file(self.model.state_dict(), draft / HEAD_FILE)

    def save_state(self, checkpoint: Path) -> None:  # noqa: D102
        if self.accelerator.is_main_process:
            draft = checkpoint / f".{STATE_FILE}"
            torch.save({name: part.state_dict() for name, part in self._parts().items()}, draft)
            os.replace(draft, checkpoint / STATE_FILE)

    def load_state(self, checkpoint: Path) -> None:  # noqa: D102
        state = torch.load(require_state(checkpoint / STATE_FILE), map_location="cpu", weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        return {"head": self.model, "optimizer": self._optimizer, "scheduler": self._scheduler}


def check_shared(args: QuRLPPOConfig, value_model: Any, value_peft_config: Any) -> None:
    """Refuse what does not work with one backbone for policy and critic."""
    if value_peft_config is not None or not (value_model is None or isinstance(value_model, str)):
        given = "value_model" if value_peft_config is None else "value_peft_config"
        raise ValueError(f"With share_backbone=True {given} has no effect: leave one of them out.")
    if value_model is not None:
        _saved_head(value_model)
    if args.fp16:
        raise ValueError("share_backbone=True does not work with fp16=True: use bf16=True, or share_backbone=False.")


def _saved_head(directory: str) -> Path:
    path = Path(directory) / HEAD_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"With share_backbone=True the critic is a head, and {directory} holds no {HEAD_FILE}: pass a directory "
            "that has one (critic/ in the output of such a run), or value_model=None."
        )
    return path
