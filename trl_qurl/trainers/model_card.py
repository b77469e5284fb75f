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

PACKAGES = ("vllm", "compressed_tensors", "trl", "transformers", "torch")  # whose versions a run depends on


@dataclass(frozen=True)
class RunDescription:
    """What a card says about a run; nothing in it says where the run was made or with which keys."""

    algorithm: str  # its name, such as "GRPO"
    citation: str  # BibTeX of the algorithm; empty for none
    scheme: QuantizationScheme | None  # of the rollouts; `None` for full precision
    settings: Mapping[str, object]  # what is needed to repeat the run, apart from model, data and rewards
    sentences: list[str] = field(default_factory=list)  # more about the algorithm


def describe_run(card: ModelCard, run: RunDescription) -> None:
    """Add to TRL's card how the rollouts were made, and the algorithm's citation; it is changed in place."""
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
        else f"The rollouts came from a quantized copy of the policy ({run.scheme.description}), made again before "
        "each generation and run by vLLM; the policy was trained, and is saved here, in full precision."
    )
    cells = [(name, str(value).replace("|", "\\|")) for name, value in run.settings.items()]
    table = ["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)]
    text = " ".join([f"The algorithm is {run.algorithm}.", rollouts, *run.sentences])
    return "\n\n".join([SECTION, text, "\n".join(table), f"Made with {made_with()}."])


def quantized_card(
    name: str,
    scheme: QuantizationScheme,
    ignore: list[str],
    full_precision: str | None,
    base_model: str | None,
    tags: list[str],
) -> ModelCard:
    """The card of a quantized checkpoint in the directory `name`.

    `full_precision` is the policy's name on the Hub, `base_model` that of what it was fine-tuned from; either may be
    missing.
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
        f"Written by {made_with()} with `save_quantized`, which rounds "
        "the weights as the rollouts of [QuRL](https://huggingface.co/papers/2602.13953) do.\n"
    )


def made_with() -> str:
    """Versions of this package and of `PACKAGES`."""
    names = packages_distributions()  # vLLM's CPU build is distributed under a name of its own
    versions = [f"{name.replace('_', '-')} {version(names[name][0])}" for name in PACKAGES if name in names]
    return f"trl-qurl {__version__} ({', '.join(versions)})"
