"""Broken syncs are noticed by digests, by version, and by the tokens that the engine samples."""

import hashlib

import pytest
import torch
from conftest import needs_vnni
from tiny import WHOLE_BLOCKS, layers_of, tiny_model

from trl_qurl.lab.activations import round_activations
from trl_qurl.lab.fake_quantization import quantized_forward
from trl_qurl.quantization import SCHEMES
from trl_qurl.quantization.plan import QuantizationPlan
from trl_qurl.rollout.checks.tensors import (
    compare_digests,
    find_not_finite,
    tensor_digest,
)
from trl_qurl.rollout.errors import SyncError

# What was broken, and the check that names it.
OTHER_FUNCTION = "The engine computes another function than the policy"
BY_CHECK = {
    "tensor skipped": "is undefined after a reload: MergedColumnParallelLinear",
    "layer skipped": "no new weights for 1 of its layers (RowParallelLinear)",
    "scale doubled before sending": OTHER_FUNCTION,
    "reload that does nothing": OTHER_FUNCTION,
    "version forgotten": "which this run sent: another run uses it",
    "prefix cache kept": OTHER_FUNCTION,
    "adapter's file changed before loading": "1 different (first base_model.model.model.layers.1",
    "adapter's file changed after loading": "it uses a different adapter than the one in",
    "scale doubled before sending, own rollouts": OTHER_FUNCTION,
    "NaN in a quantized layer": "model.layers.1.mlp.up_proj.weight holds NaN or infinity",
}
SOUND = ["none", "adapter", "own rollouts"]


@pytest.fixture(scope="module")
def broken_syncs(run_scenario, tmp_path_factory):
    return run_scenario("broken_sync.py", tmp_path_factory.mktemp("out"), *SOUND, *BY_CHECK)


@needs_vnni
@pytest.mark.vllm
@pytest.mark.xdist_group("proof")
@pytest.mark.parametrize("fault", BY_CHECK)
def test_a_broken_sync_is_noticed(fault, broken_syncs):
    assert broken_syncs[fault] is not None, "no check noticed"
    errors = ("SyncError", "RuntimeError: A part of", "RuntimeError: The engine got no new weights")
    assert broken_syncs[fault].startswith(errors)
    assert BY_CHECK[fault] in broken_syncs[fault]


@needs_vnni
@pytest.mark.vllm
@pytest.mark.xdist_group("proof")
@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_sync_raises_nothing(kind, broken_syncs):
    assert broken_syncs[kind] is None


def test_a_digest_by_hand():
    """In rows of two words, and in rows that are no whole words: then each element is one."""
    for rows, of_columns, of_rows, dtype in (
        ([[1, 2], [3, -5]], [4, -3], [3, -2, 2, 3], torch.int64),
        ([[1, 2, 3], [4, 5, 7]], [5, 7, 10], [6, 16], torch.int16),
    ):
        tensor = torch.tensor(rows, dtype=dtype)
        expected = hashlib.blake2b(f"{dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
        for sums in (of_columns, of_rows):
            expected.update(torch.tensor(sums, dtype=torch.int64).numpy())
        assert tensor_digest(tensor) == expected.hexdigest()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_digest_depends_on_order_and_signs(dtype):
    tensor = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    signs, columns, rows = tensor.clone(), tensor.roll(1, 1), tensor.roll(1, 0)
    # only the highest bit of words, in an even number of them: their sum does not change
    signs[:, 3::4] *= -1
    swapped = tensor.clone()
    swapped[0, :2], swapped[0, 2:4] = tensor[0, 2:4], tensor[0, :2]  # two words
    halves = torch.cat([tensor[256:], tensor[:256]])
    digests = {
        tensor_digest(each) for each in (tensor, signs, columns, rows, swapped, halves, -tensor)
    }
    assert len(digests) == 7


def bits_of(tensor):
    """Ways that a parameter may lie in memory, with the same values."""
    padded = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    gaps = padded[..., : tensor.shape[-1]]
    gaps.view(torch.uint8).copy_(tensor.view(torch.uint8))
    slices = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)[3:].view(tensor.shape)
    slices.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return {
        "dense": tensor,
        "transposed": tensor.transpose(0, -1),
        "gaps": gaps,
        "slice of a buffer": slices,
    }


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7,), (16,), (5, 7), (3, 5, 9)], ids=str)
@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "bool"],
)
def test_one_bit_changes_a_digest_wherever_a_tensor_lies(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(
        getattr(torch, dtype)
    )
    digest = tensor_digest(tensor)
    if tensor.dim() == 0 or tensor.numel() == 0:
        assert digest != tensor_digest(tensor[None])
        return
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[-1] ^= 1
    for place, same in bits_of(tensor).items():
        assert tensor_digest(same.transpose(0, -1) if place == "transposed" else same) == digest
        assert tensor_digest(bits_of(changed)[place]) != tensor_digest(same), place


@pytest.mark.parametrize("name", SCHEMES)
# NaNs, infinities
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x00400000, 0x7F800000, -0x00800000])
def test_a_scale_shows_a_weight_that_is_not_finite(name, bits):
    names = []
    weights = [torch.randn(128, 256), torch.full((128, 256), 3e38)]  # a sum would overflow
    sent = {
        f"{number}.{part}": tensor
        for number in range(2)
        for part, tensor in SCHEMES[name].quantize(weights[number]).items()
    }
    assert dict(find_not_finite(sent.items(), names)) == sent and not names
    weights[0][100, 200] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    broken = {f"0.{part}": tensor for part, tensor in SCHEMES[name].quantize(weights[0]).items()}
    list(find_not_finite((sent | broken).items(), names))
    assert names == ["0.weight"]


def test_digests_name_what_differs():
    with pytest.raises(
        SyncError,
        match=r"of 3 tensors, 1 missing \(first c\), 1 unexpected \(first d\), 1 different",
    ):
        compare_digests({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "d": "3"})
    compare_digests({"a": "1"}, {"a": "1"})


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_fake_quantization_is_that_of_the_codes(scheme, monkeypatch):
    # The trainer's GPU does not matter: the engine may be on a server.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    model = tiny_model(initializer_range=0.15, **WHOLE_BLOCKS).eval()
    layers = layers_of(model)
    tokens = torch.tensor([[5, 9, 70, 33]])
    plain = model(tokens).logits
    layer = model.model.layers[0].mlp.down_proj
    inputs = torch.randn(1, 3, layer.in_features)
    with quantized_forward(model, QuantizationPlan(dict.fromkeys(layers, scheme))):
        quantized = model(tokens).logits
        output = layer(inputs)
    expected = (
        round_activations(inputs, scheme.name)
        @ scheme.dequantize(scheme.quantize(layer.weight)).t()
    )
    torch.testing.assert_close(output, expected)
    assert not torch.equal(plain, quantized)
    assert torch.equal(plain, model(tokens).logits), "the change outlived the block"
