"""The critic's model: its start, and refusals before an engine starts."""

import re

import pytest
import torch
from support.building import build as build_trainer
from support.building import start_no_engine
from tiny import FAMILIES, VOCABULARY, save_tiny, tiny_classifier, tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification

from trl_qurl import QuRLPPOTrainer
from trl_qurl.trainers.critic import build_value_model

IDS = torch.tensor([[40, 50, 60, 70], [0, 41, 51, 61]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])


def build(source):
    source = source if isinstance(source, torch.nn.Module) else str(source)
    return build_value_model(source, {"device_map": None})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_critic_starts_from_a_causal_models_backbone_with_a_zero_head(tmp_path, family, tied):
    policy = tiny_model(family, tie_word_embeddings=tied)
    critic = build(save_tiny(tmp_path, model=policy))
    logits = critic(IDS, attention_mask=MASK).logits
    assert logits.shape == (2, 4, 1)
    assert not logits.any()
    for name, weight in policy.base_model.state_dict().items():
        assert torch.equal(weight, critic.base_model.state_dict()[name]), name


def test_critic_starts_from_a_reward_model_with_its_head(tmp_path):
    reward_model = tiny_classifier(AutoModelForSequenceClassification)
    critic = build(save_tiny(tmp_path, model=reward_model))
    assert torch.equal(critic.score.weight, reward_model.score.weight)


def test_critic_starts_from_a_saved_critic_and_has_no_dropout(tmp_path):
    critic = build(save_tiny(tmp_path / "policy", hidden_size=64, num_hidden_layers=1)).train()
    torch.nn.init.normal_(critic.score.weight)
    again = build(save_tiny(tmp_path / "critic", model=critic))
    assert torch.equal(again(IDS).logits, critic(IDS).logits)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (tiny_model, "Qwen2ForCausalLM"),
        (lambda: tiny_classifier(num_labels=2), "2 labels"),
        (lambda: tiny_classifier(AutoModelForSequenceClassification), "Sequence"),
    ],
)
def test_a_model_without_a_value_per_token_is_refused(model, what):
    with pytest.raises(TypeError, match=f"value_model is a .*{what}.*one value per token"):
        build(model())


# Refusals of the trainer
# ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    monkeypatch.setattr(
        "trl_qurl.rollout.backend.QuantizedVLLMGeneration._init_vllm", start_no_engine
    )


def test_another_tokenizer_is_refused_before_an_engine_starts(tmp_path):
    policy = str(save_tiny(tmp_path / "policy"))
    # The same size, with two tokens exchanged.
    exchanged = [*VOCABULARY[:40], VOCABULARY[41], VOCABULARY[40], *VOCABULARY[42:]]
    critic = str(save_tiny(tmp_path / "critic", tokenizer=tiny_tokenizer(exchanged)))
    with pytest.raises(ValueError, match=f"{critic} has another tokenizer than the policy"):
        build_trainer(
            QuRLPPOTrainer, tmp_path, model=policy, value_model=critic, processing_class=None
        )
    larger = tiny_tokenizer()
    larger.add_tokens(["<new>"])
    critic = str(save_tiny(tmp_path / "larger", vocab_size=128, tokenizer=larger))
    with pytest.raises(AssertionError):  # accepted: the engine would start now
        build_trainer(QuRLPPOTrainer, tmp_path, model=policy, value_model=critic)


def test_a_policy_from_memory_needs_a_value_model(tmp_path):
    message = "value_model=None cannot load the critic from it: save the policy"
    with pytest.raises(ValueError, match=re.escape(message)):
        build_trainer(QuRLPPOTrainer, tmp_path)


def test_a_critic_that_nothing_trains_is_refused():
    frozen = tiny_classifier()
    frozen.requires_grad_(False)
    with pytest.raises(ValueError, match=r"critic \(value_model\) has no trainable parameter"):
        build(frozen)


def test_a_critic_without_tokens_that_the_policy_samples_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<t{number}>" for number in range(9)])
    smaller = tiny_classifier(vocab_size=len(tokenizer) - 1)
    given = {"processing_class": tokenizer, "value_model": smaller}
    with pytest.raises(ValueError, match="critic's embedding has only .* rows.*resize_token_embed"):
        build_trainer(QuRLPPOTrainer, tmp_path, model=tiny_model(vocab_size=200), **given)
    with pytest.raises(AssertionError):  # the policy cannot sample more, either
        small = tiny_model(vocab_size=len(tokenizer) - 1)
        build_trainer(QuRLPPOTrainer, tmp_path, model=small, **given)
