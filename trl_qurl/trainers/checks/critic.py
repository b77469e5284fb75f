"""PPO's critic, refused before an engine starts if it has no value per token of the policy."""

from accelerate.utils import is_peft_model
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.trainer.utils import get_config_model_id

from trl_qurl.trainers.checks.policy import check_trainable


def check_value_model(model: PreTrainedModel) -> None:
    """Raise `TypeError` unless a model has one value per token; `ValueError` if it is frozen."""
    inner = model.get_base_model() if is_peft_model(model) else model
    if "TokenClassification" not in type(inner).__name__ or inner.config.num_labels != 1:
        raise TypeError(
            f"value_model is a {type(inner).__name__} with {inner.config.num_labels} labels, but "
            "must have one value per token: pass "
            "AutoModelForTokenClassification.from_pretrained(..., num_labels=1), or a name or path."
        )
    check_trainable(model, "The critic (value_model)")


def check_tokens(
    critic: PreTrainedModel,
    policy: PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
) -> None:
    """Raise `ValueError` if the policy can sample what the critic cannot read."""
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"The policy uses a {type(processing_class).__name__}, but the critic does not support "
            "images: use QuRLGRPOTrainer."
        )
    critic_rows = critic.config.get_text_config().vocab_size
    policy_rows = policy.config.get_text_config().vocab_size
    if critic_rows < min(policy_rows, len(processing_class)):
        raise ValueError(
            f"The policy knows {policy_rows} tokens, but the critic's embedding has only "
            f"{critic_rows} rows: save the resized policy and pass its path as value_model, or "
            "call value_model.resize_token_embeddings(len(tokenizer))."
        )
    source = get_config_model_id(critic.config)
    if not source or source == get_config_model_id(policy.config):
        return
    known = AutoTokenizer.from_pretrained(source).get_vocab()
    if processing_class.get_vocab().items() - known.items():
        raise ValueError(
            f"value_model {source} has another tokenizer than the policy: use a critic from the "
            "policy's model family, with its tokenizer, or value_model=None."
        )
