"""What a sync may leave out: nothing that training changes, and nothing that the engine fuses with it."""

import pytest
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from trl_qurl.quantization.checkpoint_form import parameter_name
from trl_qurl.rollout.frozen import frozen_parameters


def names(model):
    return {name for name, _ in model.named_parameters()}


def frozen(ends, **kwargs):
    model = tiny_model(**kwargs)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(ends))
    return frozen_parameters(model)


def adapted(**settings):
    return frozen_parameters(get_peft_model(tiny_model(), LoraConfig(r=2, task_type="CAUSAL_LM", **settings)))


def test_what_is_trained_is_not_frozen():
    assert frozen_parameters(tiny_model()) == set()


def test_what_is_not_trained_is_frozen():
    assert frozen("embed_tokens.weight") == {"model.embed_tokens.weight"}
    found = frozen("norm.weight")
    assert found == {name for name in names(tiny_model()) if name.endswith("norm.weight")}
    assert len(found) >= 5


def test_names_are_the_checkpoints():
    assert adapted(target_modules="all-linear") <= names(tiny_model())


@pytest.mark.parametrize("one", ["q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight"])
def test_a_layer_that_the_engine_fuses_with_trained_ones_is_sent(one):
    assert frozen(one) == set()


def test_a_whole_block_of_linear_layers_is_frozen_together():
    ends = tuple(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    assert frozen(ends) == {f"model.{end}" for end in ends}


def test_a_trained_bias_takes_its_layer_with_it():
    model = tiny_model(attention_bias=True)
    biases = [name for name in names(model) if name.endswith("bias")]
    assert biases, "the tiny model has biases"
    found = frozen("weight", attention_bias=True)
    assert not any("self_attn.q_proj" in name or "self_attn.k_proj" in name for name in found)
    assert "model.embed_tokens.weight" in found


def test_an_adapter_leaves_embedding_and_norms_alone():
    found = adapted(target_modules="all-linear")
    assert "model.embed_tokens.weight" in found
    assert {name for name in names(tiny_model()) if "norm" in name} <= found
    assert not any("proj" in name for name in found)


def test_an_adapter_on_queries_takes_the_attention_with_it():
    found = adapted(target_modules=["q_proj"])
    assert not any("self_attn" in name and "proj" in name for name in found)
    assert {name for name in names(tiny_model()) if "mlp" in name} <= found


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=["trained in full", "with an adapter"],
)
def test_an_embedding_that_changes_is_sent(settings):
    assert "model.embed_tokens.weight" not in adapted(**settings)


def test_every_parameter_of_a_peft_model_has_its_plain_name():
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    plain = {parameter_name(name) for name in names(model) if "lora_" not in name and "original_module" not in name}
    assert plain == names(tiny_model())
