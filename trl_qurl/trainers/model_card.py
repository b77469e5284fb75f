"""Model cards: what TRL's says, and how the rollouts were made; one of its own for a quantized checkpoint.

TRL writes the card of a run (`create_model_card`). This adds a section to it, and the algorithm's citation. The YAML
at the head is huggingface_hub's business.
"""

from collections.abc import Mapping
from importlib.metadata import packages_distributions, version

from huggingface_hub import ModelCard, ModelCardData

from trl_qurl import __version__
from trl_qurl.config import QuRLGRPOConfig, QuRLPPOConfig
from trl_qurl.objective import OBJECTIVES
from trl_qurl.quantization.schemes import QuantizationScheme, get_scheme

SECTION = "### Quantized rollouts"
NEXT_SECTION = "### Framework versions"
LAST_CITATION = "Cite TRL as:"

OBJECTIVES_IN_WORDS = {
    "acr": "the ratio to the full-precision policy, clipped; each token weighted by the truncated importance ratio, "
    "which lifts the upper clip bound where it is cut (adaptive clipping range)",
    "tis": "the ratio to the full-precision policy, clipped; each token weighted by the truncated importance ratio",
    "decoupled": "the ratio to the full-precision policy, clipped; each token weighted by the whole importance ratio",
    "quantized_ratio": "the ratio to the quantized policy, clipped",
    "naive": "the ratio to the full-precision policy, clipped; the difference to the quantized one is not corrected",
}
"""What each of `OBJECTIVES` does, for readers of a card."""

PACKAGES = ("vllm", "compressed_tensors", "trl", "transformers", "torch")
"""Whose versions a run depends on, by the names they are imported by."""

CITATIONS = {
    "GRPO": """@article{shao2024deepseekmath,
    title        = {{DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models}},
    author       = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and Mingchuan Zhang and \
Y. K. Li and Y. Wu and Daya Guo},
    year         = 2024,
    eprint       = {arXiv:2402.03300},
}""",
    "PPO": """@article{schulman2017proximal,
    title        = {{Proximal Policy Optimization Algorithms}},
    author       = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},
    year         = 2017,
    eprint       = {arXiv:1707.06347},
}""",
}
"""The algorithm that QuRL's rollouts serve."""


def describe_run(card: ModelCard, algorithm: str, config: QuRLGRPOConfig) -> None:
    """
    Add to TRL's card how the rollouts were made, and the algorithm's citation.

    Args:
        card: As `create_model_card` leaves it; changed in place.
        algorithm: `"GRPO"` or `"PPO"`.
        config: Of the trainer.
    """
    section = run_section(algorithm, config)
    head, mark, tail = card.text.partition(NEXT_SECTION)
    card.text = f"{head.rstrip()}\n\n{section}\n\n{mark}{tail}"
    head, mark, tail = card.text.partition(LAST_CITATION)
    if mark:
        card.text = f"{head}Cite {algorithm} as:\n\n```bibtex\n{CITATIONS[algorithm]}\n```\n\n{mark}{tail}"


def run_section(algorithm: str, config: QuRLGRPOConfig) -> str:
    """Method and settings in Markdown; nothing in it says where the run was made or with which keys."""
    scheme = None if config.rollout_quantization is None else get_scheme(config.rollout_quantization)
    critic = ", with a critic in the place of groups" if algorithm == "PPO" else ""
    rollouts = (
        "The rollouts were not quantized: vLLM generated from the policy in its own dtype."
        if scheme is None
        else f"The rollouts came from a quantized copy of the policy ({scheme.description}), made anew before each "
        "generation and run by vLLM; the policy was trained, and is saved here, in full precision."
    )
    objective = OBJECTIVES[config.objective]
    return "\n\n".join(
        [
            SECTION,
            f"The algorithm is {algorithm}{critic}. {rollouts} The objective is `{objective.name}` "
            f"({objective.equation} of QuRL): {OBJECTIVES_IN_WORDS[objective.name]}.",
            as_table(run_settings(config)),
            f"Made with trl-qurl {__version__} ({', '.join(versions())}).",
        ]
    )


def run_settings(config: QuRLGRPOConfig) -> dict[str, object]:
    """What someone needs to make the run again, beside model, data and rewards."""
    upper = config.epsilon if config.epsilon_high is None else config.epsilon_high
    settings: dict[str, object] = {
        "`rollout_quantization`": config.rollout_quantization,
        "`quantization_ignore`": ", ".join(config.quantization_ignore) or "none",
        "`objective`": config.objective,
        "cap C (`vllm_importance_sampling_clip_max`)": config.vllm_importance_sampling_clip_max,
        "`epsilon`, `epsilon_high`": f"{config.epsilon}, {upper}",
        "UAQ's s (`uaq_scale`)": config.effective_uaq_scale,
        "updates per rollout": f"{config.updates_per_rollout:g}",
        "`learning_rate`": config.learning_rate,
        "`num_generations`": config.num_generations,
        "`max_completion_length`": config.max_completion_length,
        "`temperature`": config.temperature,
        "`beta`": config.beta,
        "`loss_type`": config.loss_type,
        "`vllm_mode`": config.vllm_mode,
        "`seed`": config.seed,
    }
    if isinstance(config, QuRLPPOConfig):
        settings |= {
            "`gamma`, `gae_lambda`": f"{config.gamma}, {config.gae_lambda}",
            "`critic_learning_rate`": config.critic_learning_rate,
            "`share_backbone`": config.share_backbone,
        }
    return settings


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
