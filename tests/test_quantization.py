"""The streamed quantizer: by hand, and against llm-compressor bit for bit."""

import copy
import json

import pytest
import torch
from compressed_tensors.quantization.lifecycle import forward_helpers
from compressed_tensors.quantization.quant_args import round_to_quantized_type_args
from conftest import needs_llmcompressor
from safetensors.torch import load_file
from tiny import (
    WHOLE_BLOCKS,
    assert_same_bits,
    layers_of,
    stream_of,
    tiny_model,
    tiny_tokenizer,
    write_with_llmcompressor,
)
from torch.overrides import TorchFunctionMode

from trl_qurl.lab.activations import round_activations
from trl_qurl.quantization import SCHEMES, get_scheme, write_checkpoint
from trl_qurl.quantization.checks.served import stored_formats
from trl_qurl.quantization.merging import model_parameters

INT8 = SCHEMES["int8"]
EPS = torch.finfo(torch.float32).eps


def test_int8_codes_by_hand():
    # Channel 0: absmax 1.275, scale 1.275 / 127.5 = 0.01, codes 100 and -127.5, which rounds to the
    # even -128. Channel 1: all zero, scale = float32's eps, codes 0.
    tensors = INT8.quantize(torch.tensor([[1.0, -1.275], [0.0, 0.0]]))
    assert tensors["weight"].dtype == torch.int8
    assert tensors["weight"].tolist() == [[100, -128], [0, 0]]
    torch.testing.assert_close(tensors["weight_scale"], torch.tensor([[0.01], [EPS]]))


@pytest.mark.parametrize(
    ("scheme", "weight", "named"),
    [
        (
            SCHEMES["fp8_block"],
            torch.ones(64, 128),
            "64 x 128 is not made of whole blocks of 128 x 128",
        ),
        (INT8, torch.ones(3), r"\(3,\).*quantization_ignore"),
        (INT8, torch.ones(2, 2).int(), "torch.int32.*quantization_ignore"),
    ],
)
def test_weights_that_a_format_cannot_round_are_refused(scheme, weight, named):
    with pytest.raises(ValueError, match=named):
        scheme.quantize(weight)


def test_packed_codes_by_hand():
    # Two groups of 128. Group 0: absmax 7.5, scale 7.5 / 7.5 = 1, codes 7 (7.5 is clipped), -8
    # (-7.5 ties to even), 1. Group 1: all zero, scale = float32's eps. Codes are stored eight to a
    # word with 8 added, the first in the lowest bits: 15, 0, 9, then 8s.
    weight = torch.zeros(1, 256)
    weight[0, :3] = torch.tensor([7.5, -7.5, 1.2])
    tensors = SCHEMES["w4a16"].quantize(weight)
    words = [0x8888890F, *[0x88888888] * 31]
    assert tensors["weight_packed"].tolist() == [[word - 2**32 for word in words]]
    assert tensors["weight_scale"].tolist() == [[1.0, EPS]]
    assert tensors["weight_shape"].tolist() == [1, 256]
    # only weights are rounded
    assert round_activations(weight, "w4a16") is weight


def test_widths_that_groups_do_not_divide_are_refused_with_the_pattern_that_keeps_them(tmp_path):
    model = tiny_model(intermediate_size=192)
    message = r"2 of the 14 .*model\.layers\.0\.mlp\.down_proj: it has 192 .*'re:\.\*down_proj'"
    with pytest.raises(ValueError, match=message):
        write_checkpoint(model, None, "w4a16", tmp_path / "out")
    ignore = ["lm_head", "re:.*down_proj"]
    write_checkpoint(model, None, "w4a16", tmp_path / "out", ignore=ignore)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_scheme_says_of_its_tensors_is_what_it_makes(scheme, dtype):
    weight = torch.randn(128, 256).to(dtype)
    weight[:, 128:] *= 100  # the second of two groups or blocks
    tensors = scheme.quantize(weight)
    described = scheme.layout(weight.to("meta"))
    assert described.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert described[name].dtype == tensor.dtype
        assert described[name].shape == tensor.shape
    step = tensors["weight_scale"].float()
    for dimension in (0, 1):
        repeats = weight.shape[dimension] // step.shape[dimension]
        step = step.repeat_interleave(repeats, dimension)
    # Half a step of whole numbers, or an eighth of a float. In BF16, scale and product move the
    # largest by a quarter each.
    limit = 1.1 * step + weight.float().abs() / 8 * scheme.name.startswith("fp8")
    assert ((scheme.dequantize(tensors) - weight.float()).abs() <= limit).all()


class DivisionAsOnCUDA(TorchFunctionMode):
    """PyTorch on CUDA divides a tensor by a Python number as a product with the number's reciprocal
    in float32.
    """

    DIVISIONS = (
        torch.div,
        torch.true_divide,
        torch.Tensor.div,
        torch.Tensor.div_,
        torch.Tensor.__truediv__,
    )

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.DIVISIONS and isinstance(args[1], int | float):
            product = args[0].float() * torch.tensor(args[1], dtype=torch.float32).reciprocal()
            return product.to(args[0].dtype)
        return function(*args, **(kwargs or {}))


def quantize_as_triton(x, scale, zero_point, q_min, q_max, args, dtype=None, global_scale=None):
    """What compressed-tensors 0.19 runs on CUDA instead of `_quantize`: it divides in float32."""
    codes = round_to_quantized_type_args(
        tensor=x.float() / scale.float() + zero_point.float(),
        args=args,
        min=q_min.float(),
        max=q_max.float(),
    )
    return codes.to(x.dtype).to(dtype or x.dtype)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_rounds_to_the_same_bits(scheme, dtype, monkeypatch):
    weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = scheme.quantize(weight)
    rounded = round_activations(weight, scheme.name)
    monkeypatch.setattr(forward_helpers, "_quantize", quantize_as_triton)
    with DivisionAsOnCUDA():
        on_cuda = scheme.quantize(weight)
        assert torch.equal(round_activations(weight, scheme.name), rounded)
    assert_same_bits(on_cuda, expected)


def test_a_head_that_is_tied_is_refused():
    with pytest.raises(ValueError, match="lm_head .*quantization_ignore"):
        layers_of(tiny_model(), [])


# Against llm-compressor
# ----------------------------------------------------------------------------------------------


def with_extremes(model):
    """A model with zeros, large and tiny weights."""
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj.weight.zero_()  # a whole block
        mlp.up_proj.weight[:3] = 0
        mlp.up_proj.weight[2:4, :64] = -0.0
        model.model.layers[0].self_attn.q_proj.weight.mul_(2.0**-20)  # subnormal in float16
        # Around the smallest normal number of float16, 6.1e-5, and what rounds up to it; 3e-39 is
        # subnormal elsewhere.
        for row, value in enumerate((448.0, 447.0, 6e-5, 5e-5, 4e-5, 1e-30, 3e-39)):
            mlp.down_proj.weight[row, :64] = value
    return model


@needs_llmcompressor
@pytest.mark.parametrize(
    ("dtype", "head"),
    [
        (torch.float64, "tied"),
        (torch.float32, "untied"),
        (torch.bfloat16, "tied"),
        (torch.bfloat16, "quantized"),
        (torch.float16, "untied"),
    ],
)
@pytest.mark.parametrize(
    ("family", "scheme"),
    # A format sees no more of a family than the names of its layers.
    [*(("llama", scheme) for scheme in SCHEMES), ("qwen2", "int8"), ("qwen3", "int8")],
)
def test_stream_equals_llmcompressor_bit_for_bit(family, scheme, dtype, head, tmp_path):
    model = tiny_model(family, dtype, tie_word_embeddings=head == "tied", **WHOLE_BLOCKS)
    rounds_head = head == "quantized" and get_scheme(scheme).heads
    ignore = () if rounds_head else ("lm_head",)
    weights = stream_of(with_extremes(model), scheme, ignore)
    streamed = dict(weights.tensors(model_parameters(model)))
    write_with_llmcompressor(model, None, scheme, tmp_path / "out", ignore)
    assert_same_bits(streamed, load_file(tmp_path / "out" / "model.safetensors"))


@needs_llmcompressor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("formats", "ignore"),
    [
        *((name, ["lm_head"]) for name in SCHEMES),
        ("int8", []),
        ({"re:.*down_proj": "w4a16", "re:.*layers.0.*(gate|up)_proj": "none", "*": "int8"}, []),
        ({"re:.*self_attn": "w8a16", "re:.*down_proj": "w4a16"}, ["lm_head"]),
    ],
)
def test_both_writers_write_the_same(formats, ignore, dtype, tmp_path):
    model = tiny_model("llama", dtype, tie_word_embeddings=False, **WHOLE_BLOCKS)
    before = copy.deepcopy(model.state_dict())
    written = []
    told = []
    for write in (write_with_llmcompressor, write_checkpoint):
        path = tmp_path / write.__name__
        write(model, tiny_tokenizer(), formats, path, ignore=ignore)
        written.append(load_file(path / "model.safetensors"))
        config = json.loads((path / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        quantization = config["quantization_config"]
        told.append([quantization["format"], stored_formats(quantization, written[-1])])
        if isinstance(formats, str):
            [group] = quantization["config_groups"].values()
            for rounded in filter(None, (group["weights"], group["input_activations"])):
                del rounded["observer"]  # how the scales were found; of no interest to an engine
            told[-1] += [group, quantization["ignore"], quantization["quant_method"]]
    assert told[0] == told[1]
    assert_same_bits(*written)
    assert_same_bits(model.state_dict(), before)
