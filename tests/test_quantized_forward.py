"""Training in the quantized forward pass: what a layer computes, how often weights are rounded, what is refused."""

from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from tiny import tiny_model
from torch import nn
from transformers import Trainer, TrainingArguments

from trl_qurl import QuRLGRPOConfig
from trl_qurl.quantization import SCHEMES, quantized_layer_names
from trl_qurl.quantization.fake_quantization import QuantizedLinear, exact_forward, quantize_layers, quantized_forward
from trl_qurl.quantization.schemes.channelwise import INT8, ChannelwiseScheme
from trl_qurl.trainers.callbacks import QuantizedForwardCallback

PLAIN = {"use_cpu": True, "bf16": False, "report_to": []}


@dataclass(frozen=True, kw_only=True)
class CountingScheme(ChannelwiseScheme):
    """INT8 that counts the weights it rounds."""

    rounded: list

    def quantize(self, weight):
        self.rounded.append(weight.shape)
        return super().quantize(weight)


def counting_scheme():
    return CountingScheme(**{**vars(INT8), "name": "counting", "rounded": []})


class PlainWrites(torch.optim.SGD):
    """An optimizer that torch's own count of changes does not see, as kernels behind pointers are."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


def train(model, callback, tmp_path, optimizer=torch.optim.SGD, **settings):
    data = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 16, "labels": [[5, 6, 7, 8]] * 16})
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, save_strategy="no", report_to=[], per_device_train_batch_size=2, **settings
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=data,
        callbacks=[callback],
        optimizers=(optimizer(model.parameters(), lr=0.1), None),
    )
    trainer.train()
    return trainer


# A layer -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_gradients_are_those_of_a_layer_that_holds_the_rounded_weights(scheme, autocast):
    torch.manual_seed(0)
    layer = nn.Linear(128, 128)
    inputs = torch.randn(3, 5, 128)
    down = torch.randn(3, 5, 128)
    plain = nn.Linear(128, 128)
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        plain.weight.copy_(scheme.dequantize(scheme.quantize(layer.weight)))
    quantize_layers(nn.ModuleDict({"layer": layer}), {"layer"}, scheme)

    exact = inputs.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(exact)
        rounded = scheme.quantize_activations(inputs.to(output.dtype)).requires_grad_()
        expected = plain(rounded)
    (output.float() * down).sum().backward()
    (expected.float() * down).sum().backward()
    assert output.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert torch.equal(output, expected)
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert torch.equal(layer.bias.grad, plain.bias.grad)
    assert torch.equal(exact.grad, rounded.grad.float())


def test_a_model_stays_what_it_was_but_for_its_forward_pass():
    class OwnLinear(nn.Linear):
        pass

    model = tiny_model()
    model.model.layers[0].mlp.up_proj.__class__ = OwnLinear
    names, tokens = list(model.state_dict()), torch.tensor([[5, 9, 70, 33]])
    plain = model(tokens).logits
    layers = quantized_layer_names(model)
    with quantized_forward(model, layers, INT8):
        expected = model(tokens).logits
    assert type(model.model.layers[0].mlp.up_proj) is OwnLinear
    assert torch.equal(model(tokens).logits, plain) and not torch.equal(plain, expected)
    assert len(quantize_layers(model, layers, INT8)) == len(layers) == 14
    assert quantize_layers(model, layers, INT8) == []
    assert isinstance(model.model.layers[0].mlp.up_proj, OwnLinear)
    assert list(model.state_dict()) == names and quantized_layer_names(model) == layers
    assert torch.equal(model(tokens).logits, expected)
    with exact_forward(model):
        assert torch.equal(model(tokens).logits, plain)
    assert torch.equal(model(tokens).logits, expected)


# Rounding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_weights_are_rounded_once_per_optimizer_step(tmp_path, reentrant):
    scheme = counting_scheme()
    model = tiny_model()
    checkpointing = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    callback = QuantizedForwardCallback(scheme, ["lm_head"])
    train(
        model,
        callback,
        tmp_path,
        gradient_accumulation_steps=2,
        max_steps=3,
        gradient_checkpointing=reentrant is not None,
        **checkpointing,
    )
    assert len(scheme.rounded) == 3 * 14
    with torch.no_grad():
        for _ in range(2):
            model(torch.tensor([[5, 9, 70, 33]]))
    assert len(scheme.rounded) == 4 * 14
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        model(torch.tensor([[5, 9, 70, 33]]))
    assert len(scheme.rounded) == 4 * 14 + 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, PlainWrites])
def test_no_optimizer_leaves_old_rounded_weights(tmp_path, optimizer):
    model = tiny_model()
    trainer = train(model, QuantizedForwardCallback(INT8, ["lm_head"]), tmp_path, optimizer, max_steps=2)
    tokens = torch.tensor([[5, 9, 70, 33]])
    fresh = tiny_model()
    fresh.load_state_dict(trainer.model.state_dict())
    quantize_layers(fresh, quantized_layer_names(fresh), INT8)
    assert torch.equal(model(tokens).logits, fresh(tokens).logits)
    assert not torch.equal(tiny_model()(tokens).logits, fresh(tokens).logits)


# What is refused, and what is recorded -------------------------------------------------------------------------------


def test_there_must_be_a_format():
    with pytest.raises(ValueError, match="training_forward='quantized' with rollout_quantization=None"):
        QuRLGRPOConfig("out", training_forward="quantized", rollout_quantization=None, **PLAIN)
    with pytest.raises(ValueError, match="training_forward"):
        QuRLGRPOConfig("out", training_forward="int8", **PLAIN)


def test_the_output_head_is_refused():
    with pytest.raises(ValueError, match="keep 'lm_head' in quantization_ignore"):
        QuantizedForwardCallback(INT8, []).change(tiny_model())


def test_the_config_records_the_format(tmp_path):
    model = tiny_model()
    train(model, QuantizedForwardCallback(INT8, ["lm_head"]), tmp_path, max_steps=1)
    model.save_pretrained(tmp_path / "saved")
    saved = type(model).from_pretrained(tmp_path / "saved")
    assert saved.config.training_forward == {"scheme": "int8", "ignore": ["lm_head"]}
    assert not any(isinstance(module, QuantizedLinear) for module in saved.modules())
