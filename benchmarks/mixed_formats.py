"""What do finer formats for the worst layers of an INT8 model gain, and what do they cost?

    python benchmarks/mixed_formats.py MODEL

MODEL is a chat model such as SmolLM2-135M-Instruct. As in `int8_candidates.py`, the KL is that of whole distributions
after each token of eight answers, from forward passes that round; so formats are compared that no kernel runs here.
The layers are those that all formats can store, with the most KL per byte first.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from int8_candidates import Lab
from provenance import provenance, write_record

from trl_qurl.lab.mismatch.finer import find_steps
from trl_qurl.quantization.fake_quantization import quantized_forward
from trl_qurl.quantization.formats import SCHEMES
from trl_qurl.quantization.layers import model_layers
from trl_qurl.quantization.plan import Formats, make_plan
from trl_qurl.quantization.stream import WeightStream

COUNTS = (1, 3, 10, 30)
FINER = ("none", "w8a16", "w4a16")


def measure(lab: Lab, formats: Formats) -> dict[str, float]:
    """Return the KL, in nats per token, and the size of the checkpoint in bytes, smoothed as in training."""
    weights = WeightStream(lab.model, make_plan(lab.model, formats), smooths=True)
    weights.fit_smoothing(lab.model, lab.prompts)
    with quantized_forward(lab.model, weights.plan, weights.smoothing):
        kl = lab.kl()
    assert weights.smoothing is not None
    weights.smoothing.close()
    return {"kl": kl, "bytes": weights.nbytes(torch.bfloat16)}


def worst_layers(lab: Lab) -> list[str]:
    """Return the layers that every format of `FINER` can store, apart from fused ones, worst first."""
    weights = WeightStream(lab.model, make_plan(lab.model, "int8"))
    groups = [step.layers for step in find_steps(lab.model, weights, lab.prompts)]
    layers, finer = model_layers(lab.model), [SCHEMES[name] for name in FINER if name != "none"]
    single = [group[0] for group in groups if len(group) == 1]
    return [name for name in single if not any(scheme.refusal(layers[name].shape) for scheme in finer)]


def main() -> int:
    """Measure, print a table in Markdown with the mapping of its best row, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {"benchmark": "mixed_formats", **provenance(torch.device("cpu"), "trl_qurl")}
    lab = Lab(args.model)
    plain, worst = measure(lab, "int8"), worst_layers(lab)
    record["results"] = {"int8": plain}
    print(f"| layers | format | KL, 1e-3 nats | MB |\n|---|---|---|---|\n| none | - | {1e3 * plain['kl']:.2f} | 0 |")
    for count in [count for count in COUNTS if count <= len(worst)]:
        for name in FINER:
            formats = {**dict.fromkeys(worst[:count], name), "*": "int8"}
            found = record["results"][f"{count} in {name}"] = measure(lab, formats) | {"formats": formats}
            extra = (found["bytes"] - plain["bytes"]) / 1e6
            print(f"| {count} | {name} | {1e3 * found['kl']:.2f} | {extra:+.2f} |", flush=True)
    best = min(record["results"].values(), key=lambda found: found["kl"])
    print(f"Lowest KL: rollout_quantization={json.dumps(best.get('formats', 'int8'))}")
    print(f"Written to {write_record(record, args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
