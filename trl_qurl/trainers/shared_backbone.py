"""A critic that is one more head on the policy: hardly more memory, and one forward pass for both.

The head reads the hidden states that the policy's backbone computes anyway. It is one linear layer, so every process
keeps all of it, whatever the launcher does with the policy.

Shapes: `B` sequences, `P` prompt tokens, `T` completion tokens, `H` hidden size.
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
from trl_qurl.trainers.critic import OptimizerFactory, SchedulerFactory, ValueLossFunction, largest_norm, require_state

HEAD_FILE = "value_head.safetensors"
"""What `save_model` writes of a critic whose backbone is the policy's."""

STATE_FILE = "critic_state.pt"


class SharedBackboneCritic:
    """
    A value head on the policy's backbone, with the methods of `Critic`.

    Args:
        policy: Whose hidden states it reads, before it is wrapped for the launcher.
        args: Schedule and clipping.
        accelerator: The trainer's.
        make_optimizer: Builds the optimizer for the head.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        args: QuRLPPOConfig,
        accelerator: Accelerator,
        make_optimizer: OptimizerFactory,
    ) -> None:
        self.accelerator = accelerator
        self._args = args
        self._is_watching = False
        self._passes: list[list[torch.Tensor]] = []  # per pass over a batch, what each chunk of it gave
        self._make_optimizer = make_optimizer
        self._optimizer: Any = None
        self._scheduler: Any = None
        inner = policy.get_base_model() if is_peft_model(policy) else policy
        # Starts at zero, like the head of any critic here; float32, whatever the policy is trained in.
        self.model = nn.Linear(inner.config.get_text_config().hidden_size, 1, device=accelerator.device)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        # Not the bound method: whoever copies the policy would copy this critic and its accelerator with it.
        inner.base_model.register_forward_hook(lambda *call: self._see(*call))

    def forget(self) -> None:
        """Drop what was seen of the policy's passes."""
        self._passes.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block, a pass of the policy over a batch is seen.

        Of a pass with gradients its hidden states are kept; of one without, only the values, because the hidden states
        of a whole rollout would fill the memory.
        """
        self._passes.append([])
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False

    def _see(self, backbone: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._is_watching:
            hidden = outputs.last_hidden_state  # (b, P + T, H)
            self._passes[-1].append(hidden if torch.is_grad_enabled() else self._head(hidden))

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model(hidden.float()).squeeze(-1)  # (b, P + T)

    def rollout_values(self, batch: dict[str, Any], batch_size: int) -> torch.Tensor:
        """Values of a whole rollout, as the policy's pass over it gave them.

        Args:
            batch: Of the trainer, with prompts and completions.
            batch_size: Unused; the policy's pass had its own.

        Returns:
            `(B, T + 1)`: before each token and, in the last column, after them all.
        """
        # The first pass was the proximal policy's; a second would be the reference's, with its adapter off.
        values = torch.cat(self._passes[0])[:, -(batch["completion_ids"].size(1) + 1) :]
        self.forget()
        return values

    def add_to_policy_loss(
        self, policy_loss: torch.Tensor, batch: dict[str, Any], value_loss: ValueLossFunction
    ) -> torch.Tensor:
        """Add the value loss, whose gradient reaches the backbone through the policy's own backward pass.

        The head's part of the chain rule is done here and now; what it hands on to the hidden states h is carried by
        (h · ∂L/∂h), a term with that gradient. So the head needs no place in the wrapped policy.
        """
        (hidden,) = self._passes[0]  # (B, P + T, H)
        self.forget()
        leaf = hidden.detach().requires_grad_()
        values = self._head(leaf[:, -(batch["completion_ids"].size(1) + 1) :])
        loss = self._args.value_loss_coef * value_loss(values)
        loss.backward()
        carrier = (hidden * leaf.grad).sum(dtype=torch.float32)  # type: ignore[operator]
        return policy_loss + carrier + (loss - carrier).detach()

    def learn(self, batch: dict[str, Any], value_loss: ValueLossFunction) -> None:
        """Nothing more: it has learned with the policy."""

    def prepare(self, make_scheduler: SchedulerFactory) -> None:
        """Build optimizer and schedule; once, however often training starts."""
        if self._optimizer is None:
            self._optimizer = self._make_optimizer(self.model)
            self._scheduler = make_scheduler(self._optimizer)

    def step(self) -> dict[str, float]:
        """Average the head's gradients over the processes, clip and update; norm before clipping, learning rate."""
        for parameter in self.model.parameters():
            parameter.grad = self.accelerator.reduce(parameter.grad, reduction="mean")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), largest_norm(self._args))
        learning_rate = self._scheduler.get_last_lr()[0]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return {"critic/grad_norm": norm.item(), "critic/learning_rate": learning_rate}

    def save_pretrained(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the head; the backbone is the policy's."""
        if self.accelerator.is_main_process:
            with new_directory(directory) as draft:
                save_file(self.model.state_dict(), draft / HEAD_FILE)

    def load_head(self, directory: str) -> None:
        """Start from a head that `save_pretrained` wrote.

        Raises:
            FileNotFoundError: there is none in the directory.
            ValueError: it is of another width.
        """
        path = _saved_head(directory)
        try:
            self.model.load_state_dict(load_file(path))
        except RuntimeError as error:
            raise ValueError(f"{path} was trained on a backbone of another width: {error}") from error

    def save_state(self, checkpoint: Path) -> None:
        """Add head, optimizer and schedule to a checkpoint; a half-written file never has the final name."""
        if self.accelerator.is_main_process:
            draft = checkpoint / f".{STATE_FILE}"
            torch.save({name: part.state_dict() for name, part in self._parts().items()}, draft)
            os.replace(draft, checkpoint / STATE_FILE)

    def load_state(self, checkpoint: Path) -> None:
        """Read back what `save_state` wrote.

        Raises:
            FileNotFoundError: the checkpoint has no critic.
        """
        state = torch.load(require_state(checkpoint / STATE_FILE), map_location="cpu", weights_only=True)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        return {"head": self.model, "optimizer": self._optimizer, "scheduler": self._scheduler}


def check_shared(args: QuRLPPOConfig, value_model: Any, value_peft_config: Any) -> None:
    """Refuse what has no meaning, or does not work, with one backbone for both.

    Raises:
        ValueError: names the argument and the way out.
        FileNotFoundError: `value_model` is no directory with a saved head.
    """
    if value_peft_config is not None or not (value_model is None or isinstance(value_model, str)):
        given = "value_model" if value_peft_config is None else "value_peft_config"
        raise ValueError(
            f"share_backbone=True puts a head on the policy, so {given} has no use: leave it out, or set "
            "share_backbone=False for a critic of its own."
        )
    if value_model is not None:
        _saved_head(value_model)
    if args.fp16:
        raise ValueError(
            "share_backbone=True does not work with fp16=True, whose two loss scales would meet in one backbone: use "
            "bf16=True, or share_backbone=False."
        )


def _saved_head(directory: str) -> Path:
    path = Path(directory) / HEAD_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"With share_backbone=True the critic is a head on the policy, and {directory} holds no {HEAD_FILE}: "
            "pass a directory that has one (critic/ in the output of such a run), or value_model=None."
        )
    return path
