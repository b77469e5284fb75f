"""Compare vLLM's INT8 kernel for CPUs with exact integer sums: without VNNI, oneDNN adds products in 16 bits.

    python benchmarks/int8_saturation.py

Multiplies random activations, rounded by vLLM itself, with normal weights and with codes spread over the whole range.
Prints the relative error of the outputs (the norm of the difference over the norm of the exact product).
"""

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

TOKENS, OUTPUTS, SCALE = 64, 128, 0.01


def relative_error(codes: torch.Tensor) -> float:
    """Return the error of a product with these weights, (inputs, outputs)."""
    inputs = torch.randn(TOKENS, codes.shape[0])
    # vLLM's kernel takes the weight's rows as columns.
    column_major = codes.t().contiguous().t()
    scales = torch.full((1, OUTPUTS), SCALE)
    handler = ops.create_onednn_scaled_mm(column_major, scales, torch.float32, True, True, 32)
    rounded, input_scales, _ = ops.onednn_scaled_int8_quant(inputs, None, None, True)
    outputs = torch.zeros(TOKENS, OUTPUTS)
    ops.onednn_scaled_mm(handler, rounded, outputs, input_scales, None, None, None)
    exact = (rounded.double() @ codes.double()) * input_scales.double() * SCALE
    return float((outputs - exact).norm() / exact.norm())


def main() -> None:
    """Print a line per size."""
    assert current_platform.is_cpu(), "this compares vLLM's CPU build"
    torch.manual_seed(0)
    capabilities = torch.cpu.get_capabilities()
    names = [name for name in ("avx512_vnni", "avx_vnni", "amx_int8") if capabilities.get(name)]
    print(f"{capabilities['cpu_name']}, {', '.join(names) or 'no VNNI'}")
    for size in (128, 576, 1536):
        normal = (torch.randn(size, OUTPUTS) * 40).clamp(-127, 127).round().to(torch.int8)
        spread = torch.randint(-127, 128, (size, OUTPUTS), dtype=torch.int8)
        print(f"{size:>5} inputs: normal {relative_error(normal):.1%}, spread {relative_error(spread):.1%}")


if __name__ == "__main__":
    main()
