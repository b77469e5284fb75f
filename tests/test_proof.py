"""Broken syncs are noticed by digests, by version, and by the tokens that the engine samples."""

import hashlib

import pytest
import torch
from conftest import needs_vnni

from trl_qurl.quantization import SCHEMES
from trl_qurl.rollout.checks.tensors import find_not_finite, tensor_digest

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
    said = broken_syncs[fault]
    assert said is not None, "no check noticed"
    errors = ("SyncError", "RuntimeError: A part of", "RuntimeError: The engine got no new weights")
    assert said.startswith(errors)
    assert BY_CHECK[fault] in said


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


def lying(tensor):
    """The same values dense, with gaps between rows, and as a slice of a buffer."""
    *rows, width = tensor.shape
    gaps = torch.zeros(*rows, width + 3, dtype=tensor.dtype)[..., :width]
    part = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)[3:].view(tensor.shape)
    for each in (gaps, part):
        each.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return [tensor, gaps, part]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (16,), (5, 7), (3, 5, 9)], ids=str)
@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "bfloat16", "float8_e4m3fn", "int8", "bool"],
)
def test_one_bit_changes_a_digest_wherever_a_tensor_lies(dtype, shape):
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(getattr(torch, dtype))
    digest = tensor_digest(tensor)
    if tensor.dim() == 0 or tensor.numel() == 0:
        assert digest != tensor_digest(tensor[None])
        return
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[-1] ^= 1
    assert set(map(tensor_digest, lying(tensor))) == {digest}
    assert digest not in map(tensor_digest, lying(changed))


@pytest.mark.parametrize("name", SCHEMES)
# NaNs, infinities
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x00400000, 0x7F800000, -0x00800000])
def test_a_scale_shows_a_weight_that_is_not_finite(name, bits):
    names = []
    sent = {}

    def quantize(number, weight):
        for part, tensor in SCHEMES[name].quantize(weight).items():
            sent[f"{number}.{part}"] = tensor

    weight = torch.randn(128, 256)
    quantize(0, weight)
    quantize(1, torch.full((128, 256), 3e38))  # a sum would overflow
    assert dict(find_not_finite(sent.items(), names)) == sent
    assert not names
    weight[100, 200] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    quantize(0, weight)
    list(find_not_finite(sent.items(), names))
    assert names == ["0.weight"]
