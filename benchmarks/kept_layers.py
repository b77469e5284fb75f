"""Which layers to keep in 16 bits: those that `trl-qurl mismatch` chooses, the usual ones, or any?

    python benchmarks/kept_layers.py
    python benchmarks/kept_layers.py --models llama --randoms 1

Three models of random weights with outliers, injected without changing the function: a norm's gain is multiplied in a
few channels, and the inputs of the layers after it divided. What is compared keeps as many bytes in 16 bits as the
usual rule (the first two blocks and the last four), and a real INT8 engine says what KL is left. Then a budget of a
fifth of INT8's KL is given: is it reached, and with how many bytes?
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from trl_qurl.lab.mismatch.engines import BASELINE, Engines, Sampling
from trl_qurl.lab.mismatch.keep import Budget, extra_bytes, keep_layers
from trl_qurl.lab.mismatch.run import Report
from trl_qurl.lab.mismatch.sensitivity import Group, Sensitivity, fused_groups, within_bytes
from trl_qurl.lab.mismatch.statistics import measure
from trl_qurl.quantization.schemes import get_scheme

BLOCKS = 12
FIRST, LAST = 2, 4
"""The blocks that are kept by hand."""

OUTLIERS = {
    "llama": {
        (3, "input_layernorm"): 40.0,
        (5, "post_attention_layernorm"): 60.0,
        (7, "post_attention_layernorm"): 20.0,
    },
    "qwen3": {
        (0, "post_attention_layernorm"): 30.0,
        (6, "input_layernorm"): 60.0,
        (10, "post_attention_layernorm"): 60.0,
    },
    "granite": {
        (2, "post_attention_layernorm"): 60.0,
        (4, "post_attention_layernorm"): 30.0,
        (9, "input_layernorm"): 30.0,
    },
}
"""By model: the norm and the factor of its outliers. By hand, none, two and one of the three blocks are kept whole."""

CHANNELS = (7, 40, 99)


def build(family: str, has_outliers: bool = True) -> PreTrainedModel:
    """A small model of random weights, with outliers or without."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=100,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                parameter.mul_(3.0)  # so that blocks matter as much as the embedding
    for (block, norm), factor in OUTLIERS[family].items() if has_outliers else ():
        inject(model.model.layers[block], norm, factor)
    return model


def inject(block: Any, norm: str, factor: float) -> None:
    """Make the inputs of the layers after a norm large in a few channels, without changing the function."""
    attention, feed_forward = block.self_attn, block.mlp
    fed = (attention.q_proj, attention.k_proj, attention.v_proj)
    if norm == "post_attention_layernorm":
        fed = (feed_forward.gate_proj, feed_forward.up_proj)
    with torch.no_grad():
        for channel in CHANNELS:
            getattr(block, norm).weight[channel] *= factor
            for layer in fed:
                layer.weight[:, channel] /= factor


def save(model: PreTrainedModel, directory: Path) -> None:
    """With a tokenizer of one token per character."""
    characters = ["<pad>", "<eos>", *map(chr, range(32, 127))]
    vocabulary = Tokenizer(models.BPE({token: i for i, token in enumerate(characters)}, [], unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        directory
    )
    model.save_pretrained(directory)


def by_hand(layers: Collection[str]) -> list[str]:
    """The layers of the first and the last blocks."""
    kept = {str(block) for block in (*range(FIRST), *range(BLOCKS - LAST, BLOCKS))}
    return [layer for layer in sorted(layers) if layer.split(".")[2] in kept]


def at_random(layers: Collection[str], sizes: dict[str, int], budget: int, seed: int) -> list[str]:
    """Groups that an engine fuses, drawn until no further one fits."""
    groups = fused_groups(layers)
    random.Random(seed).shuffle(groups)
    kept: list[str] = []
    for group in groups:
        if sum(sizes[layer] for layer in (*kept, *group)) <= budget:
            kept += group
    return kept


def compare(family: str, randoms: int, console: Console) -> dict[str, Any]:
    """KL of the INT8 engine by what is kept."""
    scheme, ignore = get_scheme("int8"), ("lm_head",)
    with tempfile.TemporaryDirectory() as directory:
        save(build(family), Path(directory))
        say = lambda line: console.print(f"{family}: {line}")  # noqa: E731
        engines = Engines(directory, Sampling(samples=8, max_tokens=48), {}, say)
        layers = engines.check(scheme, ignore)
        report, answers = Report(family, Sampling(), ignore), []
        for name in (BASELINE, "int8"):
            answers, scored = engines.sample(name, ignore)
            report.formats[name] = measure(scored)
        with engines.policy() as policy:
            sizes = extra_bytes(policy, scheme, layers)
            groups = Sensitivity(policy, scheme, layers, answers).measure(sizes)
        budget = sum(sizes[layer] for layer in by_hand(layers))
        lists: dict[str, Sequence[str]] = {"none": [], "by hand": by_hand(layers)}
        lists["chosen"] = names_of(within_bytes(groups, budget))
        lists |= {f"random {seed}": at_random(layers, sizes, budget, seed) for seed in range(randoms)}
        rows = {"16 bits": row(report.formats[BASELINE], sum(sizes.values())), "none": row(report.formats["int8"], 0)}
        for name, kept in lists.items():
            if kept:
                found = measure(engines.sample("int8", (*ignore, *kept))[1])
                rows[name] = row(found, sum(sizes[layer] for layer in kept))
        allowed = report.formats["int8"].kl_k3.value / 5
        kept, scored = keep_layers(engines, scheme, report, answers, Budget(kl=allowed), say)
        rows["chosen for a KL"] = row(measure(scored), kept.extra_bytes) | {"budget": allowed}
    return {"rows": rows, "groups": [asdict(group) | {"worth": group.worth} for group in groups]}


def names_of(groups: Sequence[Group]) -> list[str]:
    """The layers of several groups."""
    return [layer for group in groups for layer in group.layers]


def row(found: Any, kept_bytes: int) -> dict[str, Any]:
    """KL with its interval, and the bytes that are spent."""
    return {"kl_k3": asdict(found.kl_k3), "bytes": kept_bytes}


def build_table(results: dict[str, Any]) -> Table:
    """KL in thousandths."""
    table = Table(title="INT8: KL in 1e-3 nats per token by the layers kept in 16 bits", box=box.SIMPLE_HEAD)
    for heading in ("model", "kept", "kB", "KL", "budget"):
        table.add_column(heading, justify="left" if heading in ("model", "kept") else "right")
    for family, result in results.items():
        for name, found in result["rows"].items():
            kl = found["kl_k3"]
            shown = f"{1e3 * kl['value']:.3g} ± {1e3 * (kl['high'] - kl['low']) / 2:.2g}"
            budget = f"{1e3 * found['budget']:.3g}" if "budget" in found else ""
            table.add_row(family, name, f"{found['bytes'] / 1e3:.0f}", shown, budget)
    return table


def main() -> int:
    """Compare, print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(OUTLIERS), default=list(OUTLIERS))
    parser.add_argument("--randoms", type=int, default=3, help="random lists (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    console = Console()
    record = {"benchmark": "kept_layers", **provenance(torch.device("cpu"), "trl_qurl")}
    record["results"] = {family: compare(family, args.randoms, console) for family in args.models}
    console.print(build_table(record["results"]))
    console.print(f"Written to {write_record(record, args.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
