"""What would float16 change in place of bfloat16? Its grid is eight times finer (arXiv 2510.26788).

    python benchmarks/half_precision.py MODEL

*Updates*: every weight of the linear layers moves by `step`, AdamW's largest update at that
learning rate, in a random direction; `changed` is the share of weights that the 16-bit type then
rounds to another value, and `seen` the part of the move that these changes make up. *Mismatch*: the
Kullback-Leibler divergence in nats per token of the distributions after each token of 16 answers of
at most 64 tokens. A `pass` has float32 weights under autocast, as in TRL; a `copy` has weights and
activations in 16 bits, as in an engine, but with PyTorch's kernels. Nothing is trained.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch
from mixed_formats import Lab
from provenance import provenance, write_record

TYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
STEPS = (1e-6, 1e-5, 1e-4)
"""One update at two usual learning rates, and ten in one direction at the larger."""


@torch.no_grad()
def updates(model: torch.nn.Module, dtype: torch.dtype, step: float) -> dict[str, float]:
    """The shares of weights that change, and of the move that is seen."""
    changed = seen = count = 0.0
    noise = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            sign = torch.randint(0, 2, module.weight.shape, generator=noise) * 2 - 1
            moved = (module.weight + step * sign).to(dtype).float() - module.weight.to(
                dtype
            ).float()
            changed, seen = (
                changed + float((moved != 0).sum()),
                seen + float((moved * sign).double().sum()) / step,
            )
            count += moved.numel()
    return {"changed": changed / count, "seen": seen / count}


@torch.no_grad()
def mismatch(lab: Lab, dtype: torch.dtype) -> dict[str, float]:
    """The divergences between the exact distributions, those of a pass, and those of a copy."""
    copied = copy.deepcopy(lab.model).to(dtype)
    sums = {"pass from exact": 0.0, "copy from exact": 0.0, "pass from copy": 0.0}
    # one at a time: a vocabulary may be large
    for prompt, answer in zip(lab.prompts, lab.answers, strict=True):
        place = slice(len(prompt) - 1, -1)
        exact = lab.model(answer).logits[0, place].log_softmax(-1)
        with torch.autocast("cpu", dtype):
            seen = lab.model(answer).logits[0, place].float().log_softmax(-1)
        other = copied(answer).logits[0, place].float().log_softmax(-1)
        for name, (p, q) in zip(sums, ((exact, seen), (exact, other), (other, seen)), strict=True):
            sums[name] += float((p.exp() * (p - q)).sum())
    tokens = sum(
        answer.shape[1] - len(prompt)
        for prompt, answer in zip(lab.prompts, lab.answers, strict=True)
    )
    return {name: total / tokens for name, total in sums.items()}


def main() -> int:
    """Measure, print two tables in Markdown, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    lab = Lab(args.model)
    record = {
        "benchmark": "half_precision",
        **provenance(torch.device("cpu"), "trl_qurl"),
        "model": Path(args.model).resolve().name,
    }
    record["updates"] = {
        name: {str(s): updates(lab.model, dtype, s) for s in STEPS} for name, dtype in TYPES.items()
    }
    record["mismatch"] = {name: mismatch(lab, dtype) for name, dtype in TYPES.items()}
    print("| type | step | changed | seen |\n|---|---|---|---|")
    for name, row in record["updates"].items():
        for step, found in row.items():
            print(f"| {name} | {step} | {found['changed']:.2%} | {found['seen']:.2%} |")
    print(f"\n| type | {' | '.join(record['mismatch']['BF16'])} |\n|---|---|---|---|")
    for name, row in record["mismatch"].items():
        print(f"| {name} | {' | '.join(f'{value:.2e}' for value in row.values())} |")
    print(f"Written to {write_record(record, args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
