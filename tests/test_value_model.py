"""The critic's model: what it is made from, and what is refused before an engine starts."""

import functools
import re

import pytest
import torch
from datasets import Dataset
from tiny import FAMILIES, tiny_classifier, tiny_model, tiny_tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import GRPOTrainer

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig, QuRLPPOTrainer
from trl_qurl.trainers.critic import build_value_model

IDS = torch.tensor([[40, 50, 60, 70], [0, 41, 51, 61]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])


def save(directory, model, tokenizer=None):
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return str(directory)


def build(source, peft_config=None, **init_kwargs):
    return build_value_model(source, tiny_tokenizer(), {"device_map": None, **init_kwargs}, peft_config)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_causal_model_lends_its_backbone_and_the_head_starts_at_zero(tmp_path, family, tied, caplog):
    policy = tiny_model(family, tie_word_embeddings=tied)
    critic = build(save(tmp_path, policy, tiny_tokenizer()))
    assert critic(IDS, attention_mask=MASK).logits.shape == (2, 4, 1)
    assert not critic(IDS, attention_mask=MASK).logits.any()
    for name, weight in policy.base_model.state_dict().items():
        assert torch.equal(weight, critic.base_model.state_dict()[name]), name
    assert not caplog.records, "transformers reports a missing head, which is meant to be missing"


def test_a_critic_has_no_dropout(tmp_path):
    critic = build(save(tmp_path, tiny_model())).train()
    torch.nn.init.normal_(critic.score.weight)
    assert torch.equal(critic(IDS).logits, critic(IDS).logits)


def test_a_reward_model_lends_its_head_too(tmp_path):
    reward_model = tiny_classifier(AutoModelForSequenceClassification)
    critic = build(save(tmp_path, reward_model))
    assert torch.equal(critic.score.weight, reward_model.score.weight)


def test_a_saved_critic_comes_back(tmp_path):
    critic = build(save(tmp_path / "policy", tiny_model()))
    torch.nn.init.normal_(critic.score.weight)
    again = build(save(tmp_path / "critic", critic, tiny_tokenizer()))
    assert torch.equal(again(IDS).logits, critic(IDS).logits)


def test_another_size_of_the_same_family(tmp_path):
    critic = build(save(tmp_path, tiny_model(hidden_size=64, num_hidden_layers=1), tiny_tokenizer()))
    assert critic(IDS).logits.shape == (2, 4, 1)


def test_a_model_may_be_passed(tmp_path):
    critic = tiny_classifier()
    assert build(critic) is critic


def test_an_adapter_trains_itself_and_the_head_only(tmp_path):
    from peft import LoraConfig

    # As a user would write it for the policy; its task type would leave the head frozen.
    critic = build(save(tmp_path, tiny_model()), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert any("score.modules_to_save" in name for name in trained)
    assert not critic(IDS, attention_mask=MASK).logits.any()


def other_tokenizer():
    """The same size, with two tokens exchanged."""
    from tokenizers import Tokenizer, models

    tokens = [*tiny_tokenizer().convert_ids_to_tokens(range(len(tiny_tokenizer())))]
    tokens[40], tokens[41] = tokens[41], tokens[40]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def test_another_tokenizer_is_refused(tmp_path):
    path = save(tmp_path, tiny_model(), other_tokenizer())
    with pytest.raises(
        ValueError, match=r"different tokenizer .*2 tokens differ: 'F' is 40 for the policy and 41 for the"
    ):
        build(path)


def test_a_larger_vocabulary_with_the_same_tokens_is_fine(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    build(save(tmp_path, tiny_model(vocab_size=128), tokenizer))


def test_a_backbone_with_holes_is_refused(tmp_path):
    model = tiny_model()
    weights = model.state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"lacks weights of its backbone \(model.layers.1.mlp.up_proj.weight\)"):
        build(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (lambda: tiny_model(), "Qwen2ForCausalLM"),
        (lambda: tiny_classifier(num_labels=2), "2 labels"),
        (lambda: tiny_classifier(AutoModelForSequenceClassification), "Sequence"),
    ],
)
def test_a_model_without_a_value_per_token_is_refused(model, what):
    with pytest.raises(TypeError, match=f"value_model is a .*{what}.*one value per token"):
        build(model())


# Refusals of the trainer, all before an engine starts ---------------------------------------------------------------


def trainer(tmp_path, model=None, *, processing_class=None, config=None, settings=None, **arguments):
    settings = {"use_cpu": True, "bf16": False, "steps_per_generation": 2} | (settings or {})
    return QuRLPPOTrainer(
        model=model or save(tmp_path / "policy", tiny_model(), tiny_tokenizer()),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=config or QuRLPPOConfig(str(tmp_path / "out"), **settings),
        train_dataset=Dataset.from_dict({"prompt": ["ab"] * 16}),
        processing_class=processing_class,
        **arguments,
    )


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    @functools.wraps(GRPOTrainer.__init__)
    def start(*args, **kwargs):
        raise AssertionError("an engine was started")

    monkeypatch.setattr("trl.GRPOTrainer.__init__", start)


def test_the_config_of_grpo_is_refused(tmp_path):
    config = QuRLGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, steps_per_generation=2)
    with pytest.raises(TypeError, match=r"QuRLGRPOConfig, which lacks .* pass a trl_qurl.QuRLPPOConfig"):
        trainer(tmp_path, config=config)


def test_a_critic_of_another_tokenizer_is_refused_before_an_engine_starts(tmp_path):
    path = save(tmp_path / "critic", tiny_model(), other_tokenizer())
    with pytest.raises(ValueError, match="uses a different tokenizer than the policy"):
        trainer(tmp_path, value_model=path)


def test_a_policy_from_memory_leaves_the_critic_without_a_start(tmp_path):
    with pytest.raises(
        ValueError, match=re.escape("value_model=None cannot load the critic from it: save the policy")
    ):
        trainer(tmp_path, tiny_model(), processing_class=tiny_tokenizer())
