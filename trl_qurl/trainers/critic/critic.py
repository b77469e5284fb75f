"""What a critic does, as an abstract class, and the optimizer that every critic gets.

Shapes: `B` sequences, `P` prompt tokens, `T` completion tokens, `H` hidden size.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase, Trainer

from trl_qurl.config import QuRLPPOConfig

CRITIC_DIRECTORY = "critic"
"""Where `save_model` puts the critic, in the directory of the policy."""

OptimizerFactory = Callable[[torch.nn.Module], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]

ValueLossFunction = Callable[[torch.Tensor], torch.Tensor]
"""From a micro-batch's values, `(B, T + 1)`, to its share of the loss of an optimizer step."""

PolicyPass = list[torch.Tensor]
"""What a critic has seen of one forward pass of the policy: a tensor per chunk of the batch, or nothing."""


class Critic(ABC):
    """A value model that learns along with the policy.

    A trainer wraps each forward pass of the policy in `watching()`, asks for `rollout_values` at each rollout, and at
    each micro-batch calls `add_to_policy_loss` before the policy's backward pass and `learn` after it. `step` follows
    at each optimizer step.
    """

    def __init__(self, model: torch.nn.Module, args: QuRLPPOConfig, accelerator: Accelerator) -> None:
        self.model: Any = model  # what learns; `prepare` may wrap it for the launcher
        self.accelerator = accelerator
        self._args = args
        self._optimizer: Any = None
        self._scheduler: Any = None

    def prepare(self, make_optimizer: OptimizerFactory, make_scheduler: SchedulerFactory) -> None:
        """Build optimizer and schedule; once, however often training starts."""
        if self._optimizer is None:
            self._optimizer = make_optimizer(self.model)
            self._scheduler = make_scheduler(self._optimizer)
            self._wrap()

    def _wrap(self) -> None:  # noqa: B027
        """Wrap model, optimizer and schedule for the launcher, for a critic that learns in passes of its own."""

    def watching(self) -> AbstractContextManager[PolicyPass]:
        """See the forward pass of the policy inside the block; the block's value is what was seen of it."""
        return nullcontext([])

    @abstractmethod
    def rollout_values(self, batch: dict[str, Any], batch_size: int, seen: PolicyPass) -> torch.Tensor:
        """Values of a whole rollout, `(B, T + 1)`: before each token and, in the last column, after them all.

        They come from the policy's pass over it (`seen`), or from passes over `batch_size` sequences each.
        """

    def add_to_policy_loss(
        self, policy_loss: torch.Tensor, batch: dict[str, Any], seen: PolicyPass, value_loss: ValueLossFunction
    ) -> torch.Tensor:
        """The policy's loss of a micro-batch, with the critic's where both share one backward pass."""
        return policy_loss

    def learn(self, batch: dict[str, Any], value_loss: ValueLossFunction) -> None:  # noqa: B027
        """Forward and backward pass on a micro-batch, for a critic that has passes of its own."""

    def step(self) -> dict[str, float]:
        """Clip, update and forget the gradients; the norm before clipping, and the learning rate used."""
        norm = self._clip(self._args.max_grad_norm or math.inf)  # 0 turns clipping off, as for the policy
        learning_rate = self._scheduler.get_last_lr()[0]
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()
        return {"critic/grad_norm": norm, "critic/learning_rate": learning_rate}

    @abstractmethod
    def _clip(self, largest: float) -> float:
        """Clip the gradients over all processes; returns their norm before."""

    @abstractmethod
    def save_pretrained(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write what `value_model` takes; every process calls it."""

    @abstractmethod
    def save_state(self, checkpoint: Path) -> None:
        """Add model, optimizer and schedule to a checkpoint; they get their name when they are complete."""

    @abstractmethod
    def load_state(self, checkpoint: Path) -> None:
        """Read back what `save_state` wrote; a checkpoint without it is an error (`require_state`)."""


def build_optimizer(model: torch.nn.Module, args: QuRLPPOConfig, decayed: set[str]) -> torch.optim.Optimizer:
    """The policy's kind of optimizer (`optim`, betas, weight decay) with the critic's learning rate.

    Weight decay applies to the parameters whose names are in `decayed`.
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
    """Refuse an optimizer that cannot be built for a second model, because it chooses its parameters itself."""
    refusal = f"optim={args.optim!r} does not work with a critic: use 'adamw_torch_fused'."
    try:
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
    except ValueError as error:  # no layer of a head is among those it should train
        raise ValueError(f"{refusal} transformers says: {error}") from error
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    if not is_class or kwargs.keys() & {"params", "model", "optimizer_dict"}:
        raise ValueError(refusal)


def require_state(path: Path) -> Path:
    """The path of a critic's state, which must be there."""
    if not path.exists():
        raise FileNotFoundError(
            f"There is no {path.name} in {path.parent}: it is incomplete, or was written by another trainer or with "
            "other settings. Resume from an earlier checkpoint, or start a new run from its model."
        )
    return path
