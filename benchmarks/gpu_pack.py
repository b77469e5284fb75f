"""Does a GPU round weights to the same bits as a CPU, and how fast?

    python benchmarks/gpu_pack.py

Weights that tell kernels apart are rounded on both: rows of zeros, subnormal numbers, outliers,
quotients halfway between two codes, and sizes that fill no block. Rows with a NaN or an infinite
weight must have a scale that is not finite: that is how a sync finds them. Then a GPU rounds a
matrix of a 7B model.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record

from trl_qurl.quantization.formats import get_scheme

FORMATS = ("int8", "fp8")
DTYPES = (torch.bfloat16, torch.float32)
SIZES = ((1, 8), (3, 136), (896, 4864), (1000, 3584))
LARGE = (18944, 3584)
"""The largest matrix of Qwen2.5-7B, (out, in)."""


def weights(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and matrices on the CPU, (out, in)."""
    torch.manual_seed(0)
    for rows, columns in SIZES:
        yield f"{rows} x {columns}", torch.randn(rows, columns).mul(0.02).to(dtype)
    hard = torch.randn(256, 1024)
    hard[0] = 0
    hard[1] = torch.finfo(dtype).tiny / 4  # subnormal
    hard[2, 7] = 1e4  # an outlier: all others round to few codes
    hard[3] = -hard[3].abs()
    # With 127 as the largest, the scale is about 1, so these lie halfway between two codes.
    hard[4] = torch.arange(1024) % 127 + 0.5
    hard[4, 0] = 127
    hard[5] = torch.tensor([0.0, -0.0]).repeat(512)
    hard[5, 0] = 1
    yield "hard", hard.to(dtype)


def differences(form: str, dtype: torch.dtype, device: str) -> list[str]:
    """Return what differs between this device and the CPU, one sentence each."""
    scheme = get_scheme(form)
    found = []
    for name, weight in weights(dtype):
        expected = scheme.quantize(weight)
        results = scheme.quantize(weight.to(device))
        if list(results) != list(expected):
            found.append(f"{name}: tensors {list(results)} instead of {list(expected)}")
            continue
        for part, exact in expected.items():
            result = results[part].cpu()
            is_alike = result.dtype == exact.dtype and result.shape == exact.shape
            wrong = result.numel()
            if is_alike:
                as_bytes = result.contiguous().view(torch.uint8)
                wrong = int((as_bytes != exact.contiguous().view(torch.uint8)).sum())
            if wrong:
                found.append(f"{name}, {part}: {wrong} of {exact.nbytes} bytes differ")
    return found + unnoticed(form, dtype, device)


def unnoticed(form: str, dtype: torch.dtype, device: str) -> list[str]:
    """Return the values that are not finite, but whose row has a finite scale."""
    found = []
    for value in (float("nan"), float("inf"), float("-inf")):
        weight = torch.ones(4, 64, dtype=dtype, device=device)
        weight[2, 5] = value
        scale = get_scheme(form).quantize(weight)["weight_scale"].flatten()
        if scale.isfinite().tolist() != [True, True, False, True]:
            found.append(f"{value}: scales {scale.tolist()}")
    return found


def seconds(form: str, dtype: torch.dtype, size: tuple[int, int], repeats: int) -> float:
    """Return the median time of rounding a matrix on the GPU."""
    weight = torch.randn(size, device="cuda").to(dtype)
    scheme = get_scheme(form)
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        scheme.quantize(weight)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])  # the first compiles


def main() -> int:
    """Compare, and return exit status 1 if a bit differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = {"benchmark": "gpu_pack", **provenance(torch.device(device), measured="trl_qurl")}
    record["cells"] = []
    for form in FORMATS:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            cell: dict[str, Any] = {"way": f"{form} from {name}"}
            try:
                if wrong := differences(form, dtype, device):
                    cell["failure"] = "; ".join(wrong)
                if device == "cuda":
                    cell["pack_s"] = seconds(form, dtype, LARGE, arguments.repeats)
            except Exception as error:  # the other formats are compared in any case
                cell["failure"] = f"{type(error).__name__}: {error}"[:500]
            record["cells"].append(cell)
            print(f"{cell['way']}: {cell.get('failure', 'the same bits')}", flush=True)
            path = write_record(record, arguments.output)
    print(f"Written to {path}")
    return int(any("failure" in cell for cell in record["cells"]))


if __name__ == "__main__":
    sys.exit(main())
