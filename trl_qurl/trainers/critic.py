"""PPO's critic: a value model that trains along with the policy, and its optimizer.

It has a separate `Accelerator`, so DDP, FSDP2 and ZeRO-3 prepare, clip and save it separately. The
value model is a token classifier with one label. A new head starts at zero, so the first advantages
equal the returns.

Shapes: `B` sequences, `P` prompt tokens, `T` completion tokens.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl.trainer.utils import create_model_from_path, disable_dropout_in_model, get_config_model_id

from trl_qurl.config.ppo import QuRLPPOConfig
from trl_qurl.quantization.checkpoint_form import whole
from trl_qurl.quantization.files import new_directory
from trl_qurl.trainers.checks.critic import check_value_model
from trl_qurl.trainers.checks.resuming import check_loaded
from trl_qurl.trainers.resuming import is_sharded, load_policy

CRITIC_DIRECTORY = "critic"  # in the directory where `save_model` writes the policy
STATE_DIRECTORY = "critic_state"  # of the critic and its optimizer, in a checkpoint
INPUTS = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")  # of a trainer's batch


class Critic:
    """A value model that learns after each backward pass of the policy, and steps with it."""

    def __init__(
        self, model: PreTrainedModel, args: QuRLPPOConfig, policy_accelerator: Accelerator
    ) -> None:
        # Accelerators of a process share one `GradientState`: a plugin with other settings would
        # change the policy's.
        plugin = GradientAccumulationPlugin(**policy_accelerator.gradient_state.plugin_kwargs)
        self.accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        # `prepare` may wrap it for the launcher; its logits are (B, P + T, 1)
        self.model: PreTrainedModel = model
        self._args = args
        self._optimizer: Any = None  # from `prepare` on
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        if not is_sharded(self.accelerator):
            model.to(self.accelerator.device)

    def prepare(self, build_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
        """Build the optimizer on the first call; training may start several times."""
        if self._optimizer is None:
            optimizer = build_optimizer(self.model)
            self.model, self._optimizer = self.accelerator.prepare(self.model, optimizer)
        self._optimizer.zero_grad()  # of a step that was interrupted

    @torch.no_grad()
    def rollout_values(self, batch: Mapping[str, torch.Tensor], batch_size: int) -> torch.Tensor:
        """Return `values` of a whole rollout, from passes of `batch_size` sequences."""
        parts = []
        for start in range(0, len(batch["completion_ids"]), batch_size):
            rows = slice(start, start + batch_size)
            parts.append(self.values({name: batch[name][rows] for name in INPUTS}))
        return torch.cat(parts)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of a micro-batch; a step's last one sums them over processes."""
        accelerator = self.accelerator
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            # the loss is already a mean over the whole step
            accelerator.backward(loss, scale_wrt_gas=False)
        elif accelerator.sync_gradients:
            accelerator.backward(loss)
        else:
            with accelerator.no_sync(self.model):
                accelerator.backward(loss)

    def values(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return values before each completion token and after the last, `(B, T + 1)`."""
        # gradient checkpointing needs train mode; dropout is off
        self.model.train(torch.is_grad_enabled())
        inputs = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)  # (B, P + T)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)  # (B, P + T)
        logits = self.model(input_ids=inputs, attention_mask=mask, use_cache=False).logits
        length = batch["completion_ids"].size(1) + 1  # with the last token of the prompt
        return logits.squeeze(-1)[:, -length:].float()

    def step(self) -> float:
        """Clip, update and clear gradients; return the norm before clipping."""
        limit = self._args.max_grad_norm or math.inf  # 0 disables clipping, as for the policy
        # `None` under DeepSpeed
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        if isinstance(norm, DTensor):  # FSDP2 shards it
            norm = norm.full_tensor()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return math.nan if norm is None else float(norm)

    def save_pretrained(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a token classifier that transformers can load."""
        state = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            with new_directory(directory) as tmp:
                self.accelerator.unwrap_model(self.model).save_pretrained(tmp, state_dict=state)
                tokenizer.save_pretrained(tmp)

    def save_state(self, checkpoint: Path) -> None:
        """Add the model and its optimizer to a checkpoint."""
        self.accelerator.save_state(str(checkpoint / STATE_DIRECTORY))

    def load_state(self, checkpoint: Path) -> None:
        """Load what `save_state` wrote.

        Without it (`save_only_model`), load the model alone, and begin with a new optimizer.

        Raises:
            RuntimeError: The model does not hold what the checkpoint's `critic/` holds.
        """
        state = checkpoint / STATE_DIRECTORY
        saved = checkpoint / CRITIC_DIRECTORY
        if state.is_dir() or is_sharded(self.accelerator):
            # Via the CPU: torch cannot load directly to "cpu:0", the device of processes in a
            # distributed CPU run. DeepSpeed refuses the argument.
            is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
            via = {} if is_deepspeed else {"map_location": "cpu"}
            self.accelerator.load_state(str(state), **via)
        else:
            self._load_model(saved)
        if not is_sharded(self.accelerator):
            check_loaded("critic", self.accelerator.unwrap_model(self.model), saved)

    def _load_model(self, directory: Path) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if not load_policy(model, directory):
            saved = type(model).from_pretrained(directory, dtype=model.dtype)
            model.load_state_dict(saved.state_dict())


def load_critic_model(
    args: QuRLPPOConfig,
    policy: str | PreTrainedModel,
    value_model: str | PreTrainedModel | None,
) -> PreTrainedModel:
    """Load the critic's model, from where the policy is loaded if `value_model` is None."""
    source = value_model
    if source is None:
        source = policy if isinstance(policy, str) else get_config_model_id(policy.config)
    if not source:
        raise ValueError(
            "The policy was not loaded from a checkpoint, so value_model=None cannot load the "
            "critic from it: save the policy and pass its path as value_model."
        )
    # Load it whole on every process; the launcher's wrapper moves it to the right device.
    init_kwargs = {
        "device_map": None,
        "trust_remote_code": args.trust_remote_code,
        **(args.model_init_kwargs or {}),
    }
    return build_value_model(source, init_kwargs)


def build_value_model(
    source: str | PreTrainedModel, init_kwargs: Mapping[str, Any]
) -> PreTrainedModel:
    """Return the critic's model, without dropout.

    A name or path may refer to a causal model (only its backbone is used), a reward model (its head
    is used too) or a saved critic. A model object must be a token classifier with one label.
    """
    model = _load(source, init_kwargs) if isinstance(source, str) else source
    check_value_model(model)
    disable_dropout_in_model(model)
    model.config.use_cache = False
    return model


def _load(source: str, init_kwargs: Mapping[str, Any]) -> PreTrainedModel:
    """Load a token classifier; what the checkpoint lacks, such as its head, starts at zero."""
    model, info = create_model_from_path(
        source,
        AutoModelForTokenClassification,
        **init_kwargs,
        num_labels=1,
        output_loading_info=True,
    )
    missing = info["missing_keys"]
    new = [parameter for name, parameter in model.named_parameters() if name in missing]
    with torch.no_grad(), whole(new):
        for parameter in new:
            parameter.zero_()
    return model
