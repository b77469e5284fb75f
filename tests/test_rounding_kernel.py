"""The kernel that rounds weights on GPUs: its bits in Triton's interpreter, and its instructions."""

import sys

import pytest
from conftest import SCENARIOS, completed

pytest.importorskip("triton")


def test_the_kernel_rounds_to_the_bits_of_pytorchs_operators():
    completed(sys.executable, SCENARIOS / "interpreted.py")


@pytest.mark.parametrize(
    ("capability", "dtype", "cast"),
    [
        (75, "fp16", "cvt.rn.f16.f32"),
        (80, "bf16", "cvt.rn.bf16.f32"),
        (90, "bf16", "cvt.rn.bf16.f32"),
        (100, "fp32", ""),
    ],
)
@pytest.mark.parametrize("is_float", [True, False], ids=["fp8", "int8"])
def test_gpus_divide_and_round_exactly(capability, dtype, cast, is_float, tmp_path, monkeypatch):
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trl_qurl.quantization.kernels import round_block

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {
        "columns": 1,
        "HEIGHT": 1,  # a row
        "WIDTH": 3584,
        "SIZE": 4096,
        "IS_FLOAT": is_float,
    }
    pointer = f"*{dtype}"
    signature = {
        "weights": pointer,
        "codes": pointer if is_float else "*i8",
        "scales": pointer,
        "low": "fp32",
        "high": "fp32",
        "eps": "fp32",
    }
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(round_block, signature, constants)
    program = compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert "div.rn.f32" in program
    assert cast in program
    # approximate, or with subnormal numbers as zeros, or two operations rounded once
    for other in ("div.full", "div.approx", "rcp", ".ftz", "fma"):
        assert other not in program
