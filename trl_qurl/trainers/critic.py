"""PPO's critic: a value model that trains along with the policy, and its optimizer.

It has a separate `Accelerator`, so DDP, FSDP2 and ZeRO-3 prepare, clip and save it separately. The
value model is a token classifier with one label. A new head starts at zero, so the first advantages
equal the returns.

Shapes: `B` sequences, `P` prompt tokens, `T` completion tokens.
"""

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, GradientAccumulationPlugin, is_peft_model
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForTokenClassification,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging
from trl.trainer.utils import create_model_from_path, disable_dropout_in_model, get_config_model_id

from trl_qurl.config import QuRLPPOConfig
from trl_qurl.quantization.checkpoint_form import whole
from trl_qurl.quantization.files import new_directory
from trl_qurl.trainers.learning import check_trainable
from trl_qurl.trainers.resuming import check_loaded, is_sharded, load_policy

if TYPE_CHECKING:
    from peft import PeftConfig

logger = get_logger(__name__)  # logs in the main process only

CRITIC_DIRECTORY = "critic"  # in the directory where `save_model` writes the policy
STATE_DIRECTORY = "critic_state"  # of the critic and its optimizer, in a checkpoint
INPUTS = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")  # of a trainer's batch
HEAD_NAMES = ("score", "classifier")  # in the token classifiers of transformers


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
            if is_peft_model(model):
                # otherwise reentrant checkpointing would compute no gradients
                model.enable_input_require_grads()
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
            ValueError: The optimizer's state is missing, and the model is sharded.
            RuntimeError: The model does not hold what the checkpoint's `critic/` holds.
        """
        state = checkpoint / STATE_DIRECTORY
        model = checkpoint / CRITIC_DIRECTORY
        missing = f"{checkpoint} has no {STATE_DIRECTORY}/ (save_only_model=True)"
        if state.is_dir():
            # Via the CPU: torch cannot load directly to "cpu:0", the device of processes in a
            # distributed CPU run. DeepSpeed refuses the argument.
            is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
            via = {} if is_deepspeed else {"map_location": "cpu"}
            self.accelerator.load_state(str(state), **via)
        elif is_sharded(self.accelerator):
            way = f"start a new run with model={str(checkpoint)!r} and value_model={str(model)!r}"
            raise ValueError(f"{missing}, and a sharded critic cannot be loaded without it: {way}.")
        else:
            logger.warning(f"{missing}: the critic's optimizer is new.")
            self._load_model(model)
        if not is_sharded(self.accelerator):
            check_loaded("critic", self.accelerator.unwrap_model(self.model), model)

    def _load_model(self, directory: Path) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if not load_policy(model, directory):
            saved = type(model).from_pretrained(directory, dtype=model.dtype)
            model.load_state_dict(saved.state_dict())


def load_critic_model(
    args: QuRLPPOConfig,
    policy: str | PreTrainedModel,
    value_model: str | PreTrainedModel | None,
    processing_class: "PreTrainedTokenizerBase | ProcessorMixin | None",
    value_peft_config: "PeftConfig | None",
) -> PreTrainedModel:
    """Load the critic's model, or raise if it does not fit the policy."""
    policy_name = _name_of(policy)
    source = policy_name if value_model is None else value_model
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
    if processing_class is None:  # as the trainer will
        processing_class = AutoProcessor.from_pretrained(policy_name, **_hub_arguments(init_kwargs))
    if isinstance(processing_class, ProcessorMixin):
        name = type(processing_class).__name__
        raise ValueError(
            f"The policy uses a {name}, but the critic does not support images: use "
            "QuRLGRPOTrainer."
        )
    return build_value_model(source, processing_class, init_kwargs, value_peft_config)


def build_value_model(
    source: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    init_kwargs: Mapping[str, Any],
    peft_config: "PeftConfig | None" = None,
) -> PreTrainedModel:
    """Load the critic, check that it can read the policy's tokens, and add an adapter if requested.

    A name or path may refer to a causal model (only its backbone is used), a reward model (its head
    is used too) or a saved critic. A model object must be a token classifier with one label.
    Dropout is turned off.
    """
    name = _name_of(source)
    if name:
        check_same_tokens(tokenizer, name, init_kwargs)
    model = _load(source, init_kwargs) if isinstance(source, str) else source
    inner = model.get_base_model() if is_peft_model(model) else model
    if "TokenClassification" not in type(inner).__name__ or inner.config.num_labels != 1:
        raise TypeError(
            f"value_model is a {type(inner).__name__} with {inner.config.num_labels} labels, but "
            "must have one value per token: pass "
            "AutoModelForTokenClassification.from_pretrained(..., num_labels=1), or a name or path."
        )
    disable_dropout_in_model(model)
    model.config.use_cache = False
    if peft_config is not None:
        model = _add_adapter(model, peft_config)
    check_trainable(model, "The critic (value_model)")
    return model


def _name_of(model: str | PreTrainedModel) -> str | None:
    """Return the name or path that a model was loaded from, if any."""
    return model if isinstance(model, str) else get_config_model_id(model.config)


def _add_adapter(model: PreTrainedModel, peft_config: "PeftConfig") -> PreTrainedModel:
    from peft import TaskType, get_peft_model

    # With another task type, the new head would be neither trained nor saved. It is trained in
    # full, so "all-linear" must not include it.
    peft_config = copy.deepcopy(peft_config)
    peft_config.task_type = TaskType.TOKEN_CLS
    excluded = getattr(peft_config, "exclude_modules", None)
    if not isinstance(excluded, str):
        peft_config.exclude_modules = [*(excluded or ()), *HEAD_NAMES]
    return get_peft_model(model, peft_config)


def check_critic_vocabulary(
    critic: PreTrainedModel, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise `ValueError` if the policy can sample a token that the critic cannot read."""
    critic_rows = critic.config.get_text_config().vocab_size
    policy_rows = policy.config.get_text_config().vocab_size
    if critic_rows < min(policy_rows, len(tokenizer)):
        raise ValueError(
            f"The policy knows {policy_rows} tokens, of which the tokenizer uses {len(tokenizer)}, "
            f"but the critic's embedding has only {critic_rows} rows: save the resized policy and "
            "pass its path as value_model, or call "
            "value_model.resize_token_embeddings(len(tokenizer))."
        )


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, source: str, init_kwargs: Mapping[str, Any]
) -> None:
    """Raise if the critic's tokenizer, if any, gives a token of the policy no or another id."""
    options = _hub_arguments(init_kwargs)
    # Without this file, AutoTokenizer may return an empty tokenizer of the architecture's class.
    quiet = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    if cached_file(source, "tokenizer_config.json", revision=options["revision"], **quiet) is None:
        return
    critic_tokens = AutoTokenizer.from_pretrained(source, **options).get_vocab()
    different = tokenizer.get_vocab().items() - critic_tokens.items()
    if different:
        token, number = min(different, key=lambda item: item[1])
        example = (
            f"{token!r} is {number} for the policy and {critic_tokens.get(token, 'unknown')} for "
            "the critic"
        )
        raise ValueError(
            f"value_model {source} uses a different tokenizer than the policy ({len(different)} "
            f"tokens differ: {example}): use a critic from the policy's model family, or "
            "value_model=None."
        )


def _hub_arguments(init_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: init_kwargs.get(name) for name in ("revision", "trust_remote_code")}


def _load(source: str, init_kwargs: Mapping[str, Any]) -> PreTrainedModel:
    init_kwargs = {**init_kwargs, "num_labels": 1, "output_loading_info": True}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # do not report a missing head or an unused one
    try:
        model, info = create_model_from_path(source, AutoModelForTokenClassification, **init_kwargs)
    finally:
        transformers_logging.set_verbosity(verbosity)
    missing = set(info["missing_keys"])
    missing_head = {name for name in missing if _is_of_head(name)}
    missing_backbone = sorted(missing - missing_head)
    if missing_backbone:
        names = ", ".join(missing_backbone[:3])
        raise ValueError(
            f"value_model {source} lacks weights of its backbone ({names}): pass a complete model."
        )
    new_head = [parameter for name, parameter in model.named_parameters() if name in missing_head]
    with torch.no_grad(), whole(new_head):
        for parameter in new_head:
            parameter.zero_()
    return model


def _is_of_head(parameter_name: str) -> bool:
    module_name = parameter_name.rpartition(".")[0]
    return module_name.split(".")[-1] in HEAD_NAMES
