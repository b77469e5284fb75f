"""Do vLLM's kernels compute here, and do engines that reloaded weights answer as new ones do?

    python benchmarks/gpu_reload.py --schemes int8 fp8 w4a16

The kernels are compared with float32. Meanwhile `trl-qurl doctor` trains in each format, in all of
them at the same time: its engines have caches of a fixed size, so they can share a GPU. What fails
is repeated in ways that name the culprit.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record

DTYPE = torch.bfloat16
ROWS, INPUTS, OUTPUTS = 64, 896, 512


def kernel_errors() -> dict[str, float]:
    """Relative errors of products with rounded inputs and weights, by format."""
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    inputs = torch.randn(ROWS, INPUTS, device="cuda", dtype=DTYPE)
    weights = torch.randn(OUTPUTS, INPUTS, device="cuda")
    exact = inputs.float() @ weights.T
    largest = weights.abs().amax(1, keepdim=True)

    def error(codes: torch.Tensor, scales: torch.Tensor, levels: int) -> float:
        weight_scales = largest / levels
        rounded = weights / weight_scales
        if not codes.is_floating_point():
            rounded = rounded.round()
        product = ops.cutlass_scaled_mm(
            codes, rounded.to(codes.dtype).T, scales, weight_scales.T.contiguous(), DTYPE
        )
        return ((product.float() - exact).norm() / exact.norm()).item()

    int8_codes, int8_scales, *_ = ops.scaled_int8_quant(inputs)
    fp8_codes, fp8_scales = ops.scaled_fp8_quant(inputs, use_per_token_if_dynamic=True)
    return {
        "int8": error(int8_codes, int8_scales, 127),
        "fp8": error(fp8_codes, fp8_scales, 448),
    }


def trials_of(form: str) -> list[dict[str, Any]]:
    """Return the lines of `trl-qurl doctor` about its trials of a format."""
    command = [sys.executable, "-m", "trl_qurl", "doctor", "--scheme", form, "--json"]
    report = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    lines = json.loads(report)["lines"]
    names = (f"train-{form}", "sleep")
    return [{"format": form, **line} for line in lines if line["name"] in names]


def main() -> int:
    """Measure, and return exit status 1 if something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", nargs="+", default=["int8", "fp8", "w4a16"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = {"benchmark": "gpu_reload", **provenance(device, measured="trl_qurl")}
    record |= {"kernels": {}, "trials": []}
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(trials_of, form) for form in arguments.schemes]
        if device.type == "cuda":
            try:
                record["kernels"] = kernel_errors()
            except Exception as error:  # the trials say more
                record["kernel_failure"] = f"{type(error).__name__}: {error}"[:500]
        for finished in as_completed(running):
            for trial in finished.result():
                record["trials"].append(trial)
                print(f"{trial['format']}, {trial['name']}: {trial['status']}. {trial['text']}")
            path = write_record(record, arguments.output)
    print(f"Written to {path}")
    failed = [trial for trial in record["trials"] if trial["status"] == "FAILED"]
    return int(bool(failed) or "kernel_failure" in record)


if __name__ == "__main__":
    sys.exit(main())
