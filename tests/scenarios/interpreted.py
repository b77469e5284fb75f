"""Rounds weights by the kernel for GPUs, in Triton's interpreter, and compares the bits with those of
PyTorch's operators.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import child  # noqa: F401, puts the tests' modules on the path
import torch
from tiny import assert_same_bits
from triton.runtime import interpreter

from trl_qurl.quantization import SCHEMES, packing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BITS = {2: torch.int16, 4: torch.int32}
NOT_FINITE = [float("nan"), -float("nan"), float("inf"), -float("inf")]
TINY = [3e-39, 1e-30, 4e-5, 5e-5, 6e-5, 6e-8]  # some are subnormal in float16, or its scale is


def convert_float(values, source, target, rounding_mode):
    """PyTorch's cast: the interpreter's cuts bits off, where a GPU rounds."""
    bits = torch.from_numpy(values.copy().view(f"int{source.primitive_bitwidth}"))
    result = bits.view(DTYPES[source.name]).to(DTYPES[target.name])
    return result.view(BITS[result.itemsize]).numpy().view(f"uint{target.primitive_bitwidth}")


interpreter._convert_float = convert_float


def rounded(name, weight, device):
    packing.FUSED_ON = device
    return SCHEMES[name].quantize(weight)


def compare(name, weight):
    print(name, flush=True)  # shown if it fails
    by_operators = rounded(name, weight, "cuda")
    assert_same_bits(rounded(name, weight, "cpu"), by_operators)


def weight_with_corners(rows, limit):
    """A weight, (rows, 256), with zeros, tiny and huge values, and quotients between two codes of the
    format whose largest is `limit`.
    """
    weight = torch.randn(rows, 256) * 0.03
    weight[0] = 0
    weight[1] = -0.0
    for row, value in enumerate(TINY, 2):
        weight[row] *= value
        weight[row + 10] = value
    weight[19] = weight[19].abs()
    weight[20] = torch.linspace(-limit, limit, 256)
    weight[21] = torch.arange(-128, 128) / 2
    weight[21, :2] = torch.tensor([limit, -limit])
    weight[22] = weight[21].nextafter(torch.tensor(9e9))
    weight[23] *= 1e5
    return weight


def every_quotient(limit):
    """A row with each number of bfloat16 up to `limit`, whose scale is 1."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return numbers[numbers.abs() <= limit][None]


def check_not_finite(name, height, dtype):
    """The scale of a block with NaN or infinity shows it, and other blocks are as without it."""
    weight = torch.randn(5 * height, 128).to(dtype)
    expected = rounded(name, weight, "cpu")
    weight[: 4 * height : height, 7] = torch.tensor(NOT_FINITE)
    result = rounded(name, weight, "cpu")
    scale = result["weight_scale"].flatten()
    assert scale.isnan().tolist() == [True, True, False, False, False]
    assert scale.isposinf().tolist() == [False, False, True, True, False]
    for part in ("weight_scale", "weight", "weight_packed"):
        if part in result:
            assert torch.equal(result[part][-1], expected[part][-1])


def main():
    torch.manual_seed(0)
    for name in SCHEMES:
        bits = SCHEMES[name].library_scheme.weights.num_bits
        limit = 448.0 if name.startswith("fp8") else (2**bits - 1) / 2
        height = 128 if name == "fp8_block" else 1
        rows = max(height, 24)
        for dtype in DTYPES.values():
            weight = weight_with_corners(rows, limit).to(dtype)
            compare(name, weight)
            compare(name, weight.new_zeros(0, 128))
            check_not_finite(name, height, dtype)
        compare(name, torch.randn(128, rows).T)  # as transposed experts
        compare(name, torch.randn(2 * rows, 128)[::2])
        if name in ("int8", "fp8"):
            compare(name, torch.randn(3, 1096))  # no power of two
            compare(name, every_quotient(limit)[:, :60000])
            compare(name, every_quotient(limit).float()[:, :60000])
    assert "trl_qurl.quantization.kernels" in sys.modules, "nothing took the kernel"


main()
