"""The critic's model: a causal backbone with a scalar head per token, built from the user's `value_model`.

For most architectures, transformers has such a class: `AutoModelForTokenClassification` with one label. A new head
starts at zero in every process, so the first values are 0 and the first advantages equal the returns.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
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
from trl_qurl.quantization.parameters import whole
from trl_qurl.trainers.critic.critic import check_optimizer

if TYPE_CHECKING:
    from peft import PeftConfig

HEAD_NAMES = ("score", "classifier")  # head names in the token classifiers of transformers


def load_critic_model(
    args: QuRLPPOConfig,
    policy: str | PreTrainedModel,
    processing_class: Any,
    value_model: str | PreTrainedModel | None,
    value_peft_config: Any,
) -> PreTrainedModel:
    """Check the user's arguments, and load the critic's model."""
    policy_name = policy if isinstance(policy, str) else get_config_model_id(policy.config)
    if value_model is None and not policy_name:
        raise ValueError(
            "The policy was not loaded from a checkpoint, so value_model=None cannot load the critic from it: save "
            "the policy and pass its path as value_model."
        )
    tokenizer = _policy_tokenizer(policy_name, args, processing_class)
    # Load it whole on every process; the launcher's wrapper moves it to the right device.
    init_kwargs = {"device_map": None, "trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    source = policy_name if value_model is None else value_model
    model = build_value_model(source, tokenizer, init_kwargs, value_peft_config)
    check_optimizer(args, model)
    return model


def build_value_model(
    source: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    init_kwargs: Mapping[str, Any],
    peft_config: "PeftConfig | None" = None,
) -> PreTrainedModel:
    """Load the critic, check that it can read the policy's tokens, and add an adapter if requested.

    A name or path may refer to a causal model (only its backbone is used), a reward model (its head is used too) or a
    saved critic. A model object must be a token classifier with one label. Dropout is turned off.
    """
    if isinstance(source, str):
        check_same_tokens(tokenizer, source, init_kwargs)
        model = _load(source, init_kwargs)
    else:
        model = source
        _check_head(model)
        if name := get_config_model_id(model.config):
            check_same_tokens(tokenizer, name, init_kwargs)
    embedding_count, token_count = model.get_input_embeddings().num_embeddings, len(tokenizer)
    if embedding_count < token_count:
        raise ValueError(
            f"The critic has {embedding_count} token embeddings, but the policy's tokenizer has {token_count} tokens: "
            "use a critic from the policy's model family."
        )
    disable_dropout_in_model(model)
    model.config.use_cache = False
    if peft_config is not None:
        from peft import TaskType, get_peft_model

        # With another task type, the new head would be neither trained nor saved. It is trained in full, so
        # "all-linear" must not include it.
        peft_config = copy.deepcopy(peft_config)
        peft_config.task_type = TaskType.TOKEN_CLS
        excluded = getattr(peft_config, "exclude_modules", None)
        if not isinstance(excluded, str):
            peft_config.exclude_modules = [*(excluded or ()), *HEAD_NAMES]
        model = get_peft_model(model, peft_config)
    return model


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, source: str, init_kwargs: Mapping[str, Any]) -> None:
    """Raise if the critic's tokenizer, if it has one, lacks a token of the policy or gives it a different id."""
    revision = init_kwargs.get("revision")
    # Without this file, AutoTokenizer may return an empty tokenizer of the architecture's class.
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if cached_file(source, "tokenizer_config.json", revision=revision, **quiet) is None:
        return
    trust = bool(init_kwargs.get("trust_remote_code"))
    critic_tokens = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust).get_vocab()
    if different := tokenizer.get_vocab().items() - critic_tokens.items():
        token, number = min(different, key=lambda item: item[1])
        raise ValueError(
            f"value_model {source} uses a different tokenizer than the policy ({len(different)} tokens differ: "
            f"{token!r} is {number} for the policy and {critic_tokens.get(token, 'unknown')} for the critic): use a "
            "critic from the policy's model family, or value_model=None."
        )


def _policy_tokenizer(policy_name: str, args: QuRLPPOConfig, processing_class: Any) -> PreTrainedTokenizerBase:
    """Return the policy's tokenizer before the trainer has loaded it."""
    if processing_class is None:
        revision = (args.model_init_kwargs or {}).get("revision")
        # Load what the trainer will load, to detect multimodal policies here.
        processing_class = AutoProcessor.from_pretrained(
            policy_name, revision=revision, trust_remote_code=args.trust_remote_code
        )
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"The policy uses a {type(processing_class).__name__}, but the critic does not support images or audio: "
            "use QuRLGRPOTrainer."
        )
    return processing_class


def _load(source: str, init_kwargs: Mapping[str, Any]) -> PreTrainedModel:
    init_kwargs = {**init_kwargs, "num_labels": 1, "output_loading_info": True}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # do not report a missing head or an unused one
    try:
        model, info = create_model_from_path(source, AutoModelForTokenClassification, **init_kwargs)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(
            f"transformers has no token classifier for the architecture of {source}, so it cannot be a critic: pass "
            "a different value_model."
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    missing = {name for name in info["missing_keys"] if name.rpartition(".")[0].split(".")[-1] not in HEAD_NAMES}
    if missing:
        raise ValueError(
            f"value_model {source} lacks weights of its backbone ({', '.join(sorted(missing)[:3])}): pass a complete "
            "model."
        )
    new_head = [parameter for name, parameter in model.named_parameters() if name in set(info["missing_keys"])]
    with torch.no_grad(), whole(new_head):
        for parameter in new_head:
            parameter.zero_()
    return model


def _check_head(model: PreTrainedModel) -> None:
    inner = model.get_base_model() if is_peft_model(model) else model
    if "TokenClassification" not in type(inner).__name__ or inner.config.num_labels != 1:
        raise TypeError(
            f"value_model is a {type(inner).__name__} with {inner.config.num_labels} labels, but must have one value "
            "per token: pass AutoModelForTokenClassification.from_pretrained(..., num_labels=1), or a name or path."
        )
