"""Model cards: a section about the rollouts for TRL's card, and the card of a quantized checkpoint.

TRL writes the card of a run (`create_model_card`). This module adds a section and the algorithm's citation to it.
"""

from collections.abc import Mapping
from importlib.metadata import packages_distributions, version

from huggingface_hub import ModelCard, ModelCardData

from trl_qurl import __version__
from trl_qurl.objective import get_objective
from trl_qurl.quantization.scheme import QuantizationScheme

PACKAGES = ("vllm", "compressed_tensors", "trl", "transformers", "torch")  # a run depends on their versions

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


def describe_objective(name: str) -> str:
    """Return a sentence that describes an objective."""
    objective = get_objective(name)
    return f"The objective is `{objective.name}` ({objective.source}): {objective.description}."


def name_local_models(card: ModelCard, start: str, trained: str) -> None:
    """Replace "None" in TRL's card, in place, with the names of models that are not on the Hub."""
    source = f"a fine-tuned version of `{start}`" if start else "a fine-tuned language model"
    card.text = card.text.replace("a fine-tuned version of [None](https://huggingface.co/None)", source)
    card.text = card.text.replace('model="None"', f'model="{trained}"')


def describe_run(card: ModelCard, sentences: list[str], settings: Mapping[str, object]) -> None:
    """Add a section about the rollouts to TRL's card, in place."""
    cells = [(name, str(value).replace("|", "\\|")) for name, value in settings.items()]
    table = ["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)]
    parts = ["### Quantized rollouts", " ".join(sentences), "\n".join(table), f"Made with {made_with()}."]
    head, mark, tail = card.text.partition("### Framework versions")
    card.text = "\n\n".join([head.rstrip(), *parts, mark + tail])


def add_citation(card: ModelCard, algorithm: str, citation: str) -> None:
    """Add the algorithm's BibTeX entry to TRL's card, in place."""
    head, mark, tail = card.text.partition("Cite TRL as:")
    if mark:
        card.text = f"{head}Cite {algorithm} as:\n\n```bibtex\n{citation}\n```\n\n{mark}{tail}"


def quantized_card(
    name: str,
    scheme: QuantizationScheme,
    ignore: list[str],
    full_precision: str | None,
    base_model: str | None,
    tags: list[str],
    adapter_rank: int = 0,
) -> ModelCard:
    """Return the model card of a quantized checkpoint, linking the policy and its base model on the Hub.

    A checkpoint with an adapter in its subdirectory `adapter` must be served with `--max-lora-rank adapter_rank`.
    """
    data = ModelCardData(
        base_model=full_precision or base_model,
        base_model_relation="quantized" if full_precision else "finetune" if base_model else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*tags, scheme.name, "compressed-tensors", "vllm"],
    )
    source = full_precision or base_model
    link = f" of [{source}](https://huggingface.co/{source})" if source else ""
    copy = "quantized copy" if full_precision or not base_model else "quantized fine-tune"
    ignored = ", ".join(f"`{pattern}`" for pattern in ignore) or "none"
    options = f" --enable-lora --max-lora-rank {adapter_rank} --lora-modules policy={name}/adapter"
    adapter_note = (
        "\n\nThe policy is this base with the adapter in `adapter`: request the model `policy` from the server."
        if adapter_rank
        else ""
    )
    bits = scheme.weight_args.num_bits
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n"
        f"# {name}\n\n"
        f"This is a {bits}-bit {copy}{link}, in the format of compressed-tensors: {scheme.description}. "
        f"Kept in full precision: {ignored}. No calibration data was used.\n\n"
        "## Serving\n\n"
        f"```bash\nvllm serve {name}{options if adapter_rank else ''}\n```{adapter_note}\n\n"
        f"Written by {made_with()} with `save_quantized`, which rounds "
        "the weights as in the rollouts of [QuRL](https://huggingface.co/papers/2602.13953).\n"
    )


def made_with() -> str:
    """Return the versions of this package and of `PACKAGES` as text."""
    names = packages_distributions()  # vLLM's CPU build has a different distribution name
    versions = [f"{name.replace('_', '-')} {version(names[name][0])}" for name in PACKAGES if name in names]
    return f"trl-qurl {__version__} ({', '.join(versions)})"
