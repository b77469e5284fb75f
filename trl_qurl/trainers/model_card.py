"""Model cards: TRL's, with how the rollouts were made; and one for a quantized checkpoint.

TRL writes the card of a run (`create_model_card`). This adds a section to it, and the algorithm's citation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions, version

from huggingface_hub import ModelCard, ModelCardData

from trl_qurl import __version__
from trl_qurl.quantization.schemes import QuantizationScheme

SECTION = "### Quantized rollouts"
NEXT_SECTION = "### Framework versions"
LAST_CITATION = "Cite TRL as:"

PACKAGES = ("vllm", "compressed_tensors", "trl", "transformers", "torch")
"""Whose versions a run depends on, by the names they are imported by."""


@dataclass(frozen=True)
class RunDescription:
    """
    What a card says about a run; nothing in it says where the run was made or with which keys.

    Attributes:
        algorithm: Its name, such as `"GRPO"`.
        citation: BibTeX of the algorithm; empty for none.
        scheme: Format of the rollouts; `None` for full precision.
        settings: What is needed to repeat the run, apart from model, data and rewards.
        sentences: More about the algorithm, in whole sentences.
    """

    algorithm: str
    citation: str
    scheme: QuantizationScheme | None
    settings: Mapping[str, object]
    sentences: list[str] = field(default_factory=list)


def describe_run(card: ModelCard, run: RunDescription) -> None:
    """
    Add to TRL's card how the rollouts were made, and the algorithm's citation.

    Args:
        card: As `create_model_card` leaves it; changed in place.
        run: What to add.
    """
    head, mark, tail = card.text.partition(NEXT_SECTION)
    card.text = f"{head.rstrip()}\n\n{run_section(run)}\n\n{mark}{tail}"
    head, mark, tail = card.text.partition(LAST_CITATION)
    if mark and run.citation:
        card.text = f"{head}Cite {run.algorithm} as:\n\n```bibtex\n{run.citation}\n```\n\n{mark}{tail}"


def run_section(run: RunDescription) -> str:
    """Method and settings in Markdown."""
    rollouts = (
        "The rollouts were not quantized: vLLM generated from the policy in its own dtype."
        if run.scheme is None
        else f"The rollouts came from a quantized copy of the policy ({run.scheme.description}), made anew before "
        "each generation and run by vLLM; the policy was trained, and is saved here, in full precision."
    )
    return "\n\n".join(
        [
            SECTION,
            " ".join([f"The algorithm is {run.algorithm}.", rollouts, *run.sentences]),
            as_table(run.settings),
            f"Made with trl-qurl {__version__} ({', '.join(versions())}).",
        ]
    )


def quantized_card(
    name: str,
    scheme: QuantizationScheme,
    ignore: list[str],
    full_precision: str | None,
    base_model: str | None,
    tags: list[str],
) -> ModelCard:
    """
    The card of a quantized checkpoint.

    Args:
        name: Of its directory.
        scheme: Of its weights.
        ignore: Modules kept in full precision.
        full_precision: Name on the Hub of the policy that was quantized, if it is there.
        base_model: Name on the Hub of what that policy was fine-tuned from, if it is there.
        tags: Of the trainer.
    """
    data = ModelCardData(
        base_model=full_precision or base_model,
        base_model_relation="quantized" if full_precision else "finetune" if base_model else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*tags, scheme.name, "compressed-tensors", "vllm"],
    )
    source = full_precision or base_model
    of = f" of [{source}](https://huggingface.co/{source})" if source else ""
    copy = "quantized copy" if full_precision or not base_model else "quantized fine-tune"
    kept = ", ".join(f"`{pattern}`" for pattern in ignore) or "none"
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n"
        f"# {name}\n\n"
        f"This is a {scheme.weight_bits}-bit {copy}{of}, in the format of compressed-tensors: {scheme.description}. "
        f"Kept in full precision: {kept}. No calibration data was used.\n\n"
        "## Serving\n\n"
        f"```bash\nvllm serve {name}\n```\n\n"
        f"Written by trl-qurl {__version__} ({', '.join(versions())}) with `save_quantized`, which rounds "
        "the weights as the rollouts of [QuRL](https://huggingface.co/papers/2602.13953) do.\n"
    )


def as_table(settings: Mapping[str, object]) -> str:
    """Two columns of Markdown."""
    cells = [(name, str(value).replace("|", "\\|")) for name, value in settings.items()]
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])


def versions() -> list[str]:
    """Of `PACKAGES`, those installed, under whatever name they are distributed (vLLM's CPU build has its own)."""
    distributions = packages_distributions()
    return [
        f"{package.replace('_', '-')} {version(distributions[package][0])}"
        for package in PACKAGES
        if package in distributions
    ]
