"""What would take the mismatch of INT8 off a real model? Candidates by the exact KL of a forward pass that rounds.

    python benchmarks/int8_candidates.py MODEL

MODEL is a chat model with Llama's names of layers, such as SmolLM2-135M-Instruct. It answers eight questions with at
most 64 tokens; the KL between the exact policy and the rounded one is that of their whole distributions after each
token of these answers. Scales are fitted to eight other prompts, without answers. What won is in the package; engines
say what it is worth there (`trl-qurl mismatch`).
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_qurl.lab.mismatch.prompts import BUILT_IN
from trl_qurl.quantization.formats import get_scheme
from trl_qurl.quantization.plan import make_plan
from trl_qurl.quantization.sensitivity import by_worth, estimate_kl, extra_bytes
from trl_qurl.quantization.stream import WeightStream

INT8 = get_scheme("int8")
Scales = dict[str, torch.Tensor]  # by the layer that reads them, (in,)
Sequences = list[tuple[list[int], int]]  # tokens, and how many of them are the prompt

NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
STATISTICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda rows: rows.abs().amax(0),
    "rms": lambda rows: rows.float().square().mean(0).sqrt(),
}


def zero_point(x: torch.Tensor) -> torch.Tensor:
    """Activations with a scale and a zero point per token, in 256 codes."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-8)
    zero = (low / scale).round()
    return ((x / scale).round() - zero).clamp(0, 255).add(zero) * scale


def round_weight(weight: torch.Tensor) -> torch.Tensor:
    """What INT8's codes stand for."""
    return INT8.dequantize(INT8.quantize(weight))


def least_error(weight: torch.Tensor) -> torch.Tensor:
    """The same with the scale of each row that has the least squared error, of five below its largest value."""
    found = [round_weight(weight.clamp(-top, top)) for top in _tops(weight)]
    errors = torch.stack([(each - weight).square().sum(1) for each in found])  # (5, out)
    return torch.stack(found)[errors.argmin(0), torch.arange(len(weight))]


def _tops(weight: torch.Tensor) -> list[torch.Tensor]:
    return [share * weight.abs().amax(1, keepdim=True) for share in (1.0, 0.95, 0.9, 0.85, 0.8)]


class Lab:
    """One model, its answers, and the exact distributions after their tokens."""

    def __init__(self, directory: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and name != "lm_head"
        }
        self.answers = [self.answer(question) for question in BUILT_IN[:8]]
        self.prompts = [self.encode(question) for question in BUILT_IN[8:]]
        self.exact = [self.logps(*answer) for answer in self.answers]

    def encode(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def answer(self, question: str) -> tuple[list[int], int]:
        torch.manual_seed(0)
        tokens = torch.tensor([self.encode(question)])
        sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
        found = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=64, **sampling)
        return found[0].tolist(), tokens.shape[1]

    def logps(self, tokens: list[int], prompt: int) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0, prompt - 1 : -1].log_softmax(-1)

    def kl(self) -> float:
        """KL(exact ‖ the model as it is now), nats per token."""
        found = []
        for answer, p in zip(self.answers, self.exact, strict=True):
            found.append((p.exp() * (p - self.logps(*answer))).sum(-1))
        return float(torch.cat(found).mean())

    def inputs(self, sequences: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        """The inputs of each layer, (tokens, in)."""
        seen: dict[str, list[torch.Tensor]] = {name: [] for name in self.layers}
        with ExitStack() as stack, torch.inference_mode():
            for name, layer in self.layers.items():
                hook = layer.register_forward_pre_hook(lambda _, given, kept=seen[name]: kept.append(given[0][0]))
                stack.callback(hook.remove)
            for tokens in sequences:
                self.model(torch.tensor([tokens]))
        return {name: torch.cat(rows) for name, rows in seen.items()}

    def scales(
        self,
        inputs: dict[str, torch.Tensor],
        of_inputs: str = "rms",
        of_weights: str = "rms",
        alpha: float = 0.4,
        powers: bool = False,
        pairs: Collection[str] = ("norms", "down"),
    ) -> Scales:
        """Scales by layer: statistic(X)^α / statistic(W)^(1 − α) over the geometric mean."""
        found: Scales = {}
        for block in range(self.model.config.num_hidden_layers):
            groups = list(NORMS.values()) if "norms" in pairs else []
            groups += [("mlp.down_proj",)] if "down" in pairs else []
            for group in groups:
                names = [f"model.layers.{block}.{name}" for name in group]
                x = STATISTICS[of_inputs](inputs[names[0]])
                w = STATISTICS[of_weights](torch.cat([self.layers[name].weight.detach() for name in names]))
                logs = alpha * x.clamp(min=1e-6).log2() - (1 - alpha) * w.clamp(min=1e-6).log2()
                logs = logs - logs.mean()
                found |= dict.fromkeys(names, (logs.round() if powers else logs).exp2())
        return found

    @contextmanager
    def rounded(
        self,
        scales: Scales | None = None,
        kept: Collection[str] = (),
        weights: Callable[[torch.Tensor], torch.Tensor] | None = round_weight,
        activations: Callable[[torch.Tensor], torch.Tensor] | None = INT8.quantize_activations,
    ) -> Iterator[None]:
        """Let the layers compute so inside the block: scaled inputs, rounded, times scaled weights, rounded."""
        with ExitStack() as stack:
            for name, layer in self.layers.items():
                if name in kept:
                    continue
                scale, exact = (scales or {}).get(name, torch.ones(())), layer.weight.data
                stack.callback(setattr, layer.weight, "data", exact)
                layer.weight.data = exact * scale if weights is None else weights(exact * scale)

                def change(_: Any, given: tuple[torch.Tensor, ...], scale: torch.Tensor = scale) -> tuple:
                    return (given[0] / scale if activations is None else activations(given[0] / scale),)

                stack.callback(layer.register_forward_pre_hook(change).remove)
            yield

    def kept(self, share: float) -> list[str]:
        """The layers that the package would keep in 16 bits for this share of the bytes."""
        weights = WeightStream(self.model, make_plan(self.model, "int8"), smooths=True)
        weights.fit_smoothing(self.model, self.prompts)
        estimates, sizes = estimate_kl(self.model, weights, self.prompts), extra_bytes(weights)
        assert weights.smoothing is not None
        weights.smoothing.close()
        found: list[str] = []
        for group in by_worth(estimates, sizes):
            if sum(sizes[x] for x in (*found, *group)) <= share * sum(sizes.values()):
                found += group
        return found


def candidates(lab: Lab) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is compared, by name."""
    inputs = lab.inputs(lab.prompts)
    smooth = lab.scales(inputs)
    yield "INT8 as it is", {}
    yield "only weights rounded", {"activations": None}
    yield "only activations rounded", {"weights": None}
    for powers in (True, False):
        for statistic in ("max", "rms"):
            name = f"scales by {statistic}" + (", powers of two" if powers else "")
            yield f"{name}, α = 0.5", {"scales": lab.scales(inputs, statistic, statistic, 0.5, powers)}
    for alpha in (0.3, 0.35, 0.4, 0.45, 0.6):
        yield (
            f"scales by rms, α = {alpha}" + (" (smoothed)" if alpha == 0.4 else ""),
            {"scales": lab.scales(inputs, alpha=alpha)},
        )
    yield "smoothed, norms alone", {"scales": lab.scales(inputs, pairs=("norms",))}
    yield "smoothed, down_proj alone", {"scales": lab.scales(inputs, pairs=("down",))}
    with_answers = lab.inputs([tokens for tokens, _ in lab.answers])
    yield "smoothed of the same answers", {"scales": lab.scales(with_answers)}
    yield "smoothed, only weights rounded", {"scales": smooth, "activations": None}
    yield "smoothed, only activations rounded", {"scales": smooth, "weights": None}
    yield "smoothed, row scales of least error", {"scales": smooth, "weights": least_error}
    yield "zero points", {"activations": zero_point}
    yield "smoothed, zero points", {"scales": smooth, "activations": zero_point}
    for share in (0.01, 0.05, 0.1):
        kept = lab.kept(share)
        yield f"smoothed, {share:.0%} of the bytes kept", {"scales": smooth, "kept": kept}
    yield "the same, and zero points", {"scales": smooth, "kept": kept, "activations": zero_point}
    yield "the same, only weights rounded", {"scales": smooth, "kept": kept, "activations": None}


def main() -> int:
    """Measure, print a table in Markdown, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {"benchmark": "int8_candidates", **provenance(torch.device("cpu"), "trl_qurl")}
    lab = Lab(args.model)
    record["results"] = {}
    print("| | KL, 1e-3 nats |\n|---|---|")
    for name, changed in candidates(lab):
        with lab.rounded(**changed):
            record["results"][name] = lab.kl()
        print(f"| {name} | {1e3 * record['results'][name]:.1f} |", flush=True)
    print(f"Written to {write_record(record, args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
