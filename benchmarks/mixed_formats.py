"""What do finer formats for the worst layers of an INT8 model gain, and what do they cost?

    python benchmarks/mixed_formats.py MODEL

MODEL is a chat model such as SmolLM2-135M-Instruct, which gives 16 answers of at most 64 tokens.
The KL is that of the distributions after each token, from forward passes that round, so formats are
compared that no kernel runs here.
"""

import argparse
import sys
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record

from trl_qurl.lab.evaluation.tasks import encode_prompt
from trl_qurl.lab.fake_quantization import quantized_forward
from trl_qurl.lab.mismatch.finer import find_steps
from trl_qurl.lab.mismatch.prompts import BUILT_IN
from trl_qurl.quantization.checkpoint import load_model
from trl_qurl.quantization.formats import SCHEMES
from trl_qurl.quantization.plan import Formats, make_plan
from trl_qurl.quantization.stream import WeightStream


class Lab:
    """One model and its answers."""

    def __init__(self, directory: str) -> None:
        model, tokenizer = load_model(directory)
        self.model: Any = model.float().eval()
        self.prompts = [encode_prompt(tokenizer, question) for question in BUILT_IN]
        torch.manual_seed(0)
        sampling = {
            "do_sample": True,
            "top_k": 0,
            "top_p": 1.0,
            "temperature": 1.0,
            "max_new_tokens": 64,
        }
        self.answers = [
            self.model.generate(torch.tensor([prompt]), **sampling) for prompt in self.prompts
        ]

    @cached_property
    def exact(self) -> torch.Tensor:
        """The exact log-probabilities, (T, V)."""
        return self.logps()

    @torch.inference_mode()
    def logps(self) -> torch.Tensor:
        """Return the log-probabilities of all tokens after each token of the answers, (T, V)."""
        pairs = zip(self.prompts, self.answers, strict=True)
        return torch.cat(
            [self.model(each).logits[0, len(prompt) - 1 : -1] for prompt, each in pairs]
        ).log_softmax(-1)

    def measure(self, formats: Formats) -> dict[str, Any]:
        """Return the KL, in nats per token, and the size of the checkpoint in bytes, smoothed as in
        training.
        """
        weights = WeightStream(self.model, make_plan(self.model, formats), smooths=True)
        weights.fit_smoothing(self.model, self.prompts)
        with quantized_forward(self.model, weights.plan, weights.smoothing):
            kl = float((self.exact.exp() * (self.exact - self.logps())).sum(-1).mean())
        return {"kl": kl, "bytes": weights.nbytes(torch.bfloat16), "formats": formats}


def main() -> int:
    """Measure, print a table in Markdown, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    lab = Lab(args.model)
    plain, weights = lab.measure("int8"), WeightStream(lab.model, make_plan(lab.model, "int8"))
    steps = find_steps(lab.model, weights, lab.prompts, [SCHEMES["w8a16"]])
    worst = [step.layers for step in steps if step.format == "w8a16"]
    record = {
        "benchmark": "mixed_formats",
        **provenance(torch.device("cpu"), "trl_qurl"),
        "results": {"int8": plain},
    }
    print(
        "| layers | format | KL, 1e-3 nats | MB |\n|---|---|---|---|\n| none | - | "
        f"{1e3 * plain['kl']:.2f} | 0 |"
    )
    for count, name in product((3, 10, 30), ("none", "w8a16", "w4a16")):
        formats = {**dict.fromkeys(chain(*worst[:count]), name), "*": "int8"}
        found = record["results"][f"{count} in {name}"] = lab.measure(formats)
        extra = (found["bytes"] - plain["bytes"]) / 1e6
        print(f"| {count} | {name} | {1e3 * found['kl']:.2f} | {extra:+.2f} |", flush=True)
    print(f"Written to {write_record(record, args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
