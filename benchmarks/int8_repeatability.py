"""Can a trainer reproduce an INT8 engine's rounding? The exact KL between forward passes of one real model.

    python benchmarks/int8_repeatability.py MODEL        # two minutes on one core

Every pass scores the same eight answers of at most 64 tokens: exactly or in INT8, smoothed or not, in float32 or under
bfloat16 autocast. If INT8 rounded the same activations to the same codes in both dtypes, the two INT8 passes would be
closer to each other than to the exact ones.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from int8_candidates import Lab
from provenance import provenance, write_record

from trl_qurl.quantization.fake_quantization import quantized_forward
from trl_qurl.quantization.plan import make_plan
from trl_qurl.quantization.stream import WeightStream

EXACT, PLAIN, SMOOTHED = "exact", "INT8", "INT8, smoothed"


def main() -> int:
    """Measure, print a table in Markdown, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    lab = Lab(args.model)
    weights = WeightStream(lab.model, make_plan(lab.model, "int8"), smooths=True)
    weights.fit_smoothing(lab.model, lab.prompts)
    assert weights.smoothing is not None
    weights.smoothing.close()
    passes = {
        f"{kind}, {dtype}": score(lab, weights, kind, dtype)
        for kind in (EXACT, PLAIN, SMOOTHED)
        for dtype in ("float32", "bfloat16")
    }
    table = {name: {other: kl(p, q) for other, q in passes.items()} for name, p in passes.items()}
    print("| KL of row and column, 1e-3 nats |", " | ".join(table), "|")
    print("|---" * (len(table) + 1) + "|")
    for name, row in table.items():
        print(f"| {name} |", " | ".join(f"{1e3 * value:.1f}" for value in row.values()), "|")
    record: dict[str, Any] = {"benchmark": "int8_repeatability", **provenance(torch.device("cpu"), "trl_qurl")}
    print(f"Written to {write_record(record | {'results': table}, args.output)}")
    return 0


def score(lab: Lab, weights: WeightStream, kind: str, dtype: str) -> torch.Tensor:
    """Return log-probabilities of all tokens after each token of the answers, (tokens, V)."""
    with ExitStack() as stack:
        if kind != EXACT:
            smoothing = weights.smoothing if kind == SMOOTHED else None
            stack.enter_context(quantized_forward(lab.model, weights.plan, smoothing))
        stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"))
        return torch.cat([lab.logps(*answer).float() for answer in lab.answers])


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """Return KL(p ‖ q), the mean over tokens."""
    return float((p.exp() * (p - q)).sum(-1).mean())


if __name__ == "__main__":
    sys.exit(main())
