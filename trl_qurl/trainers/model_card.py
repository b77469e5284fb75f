"""Model cards: a section about rollouts for TRL's card, and the card of a quantized checkpoint."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from trl_qurl.objective import OBJECTIVES
from trl_qurl.quantization.plan import QuantizationPlan
from trl_qurl.rollout.backend import QuantizedVLLMGeneration

QURL = {
    "title": "QuRL: Efficient Reinforcement Learning with Quantized Rollout",
    "id": "2602.13953",
    "citation": """@inproceedings{qurl2026,
    title        = {{QuRL: Efficient Reinforcement Learning with Quantized Rollout}},
    author       = {Li, Yuhang and Elangovan, Reena and Dong, Xin and Panda, Priyadarshini
                    and Khailany, Brucek},
    year         = 2026,
    booktitle    = {ICLR},
    eprint       = {2602.13953},
    archivePrefix = {arXiv},
}""",
}
"""The paper, in the format of TRL's cards (`_paper`)."""


def add_rollouts(algorithm: str, args: Any, generation: QuantizedVLLMGeneration) -> None:
    """Add a section about a trainer's rollouts to TRL's card in its output directory."""
    if generation.sync.route.is_merged:
        source = "a copy of the policy"
    else:
        source = "the frozen base with the unmerged adapter"
    codes = described(generation.weights.plan)
    sentences = [
        f"The algorithm is {algorithm}. vLLM generated the rollouts with {source}, {codes}."
    ]
    if args.round_base:
        sentences.append(
            "The adapter only works with a base whose weights are rounded to the values of these "
            "codes."
        )
    objective = OBJECTIVES.get(vars(args).get("objective", ""))
    if objective is not None:
        sentences.append(f"The objective is `{objective.name}` ({objective.source}).")
    sentences.append("All settings are in `run.jsonl`.")
    path = Path(args.output_dir) / "README.md"
    card = ModelCard.load(path)
    head, mark, tail = card.text.partition("### Framework versions")
    base = Path(generation.model.config._name_or_path).name  # TRL only names models on the Hub
    head = head.replace("[None](https://huggingface.co/None)", f"`{base}`")
    head = head.replace('model="None"', f'model="{path.parent.name}"')
    vars(card.data).pop("licence", None)  # a placeholder
    parts = [head.rstrip(), "### Quantized rollouts", " ".join(sentences), mark + tail]
    card.text = "\n\n".join(parts)
    card.save(path)


def quantized_card(
    name: str,
    plan: QuantizationPlan,
    full_precision: str | None,
    base_model: str | None,
    adapter_rank: int = 0,
) -> ModelCard:
    """Return the card of a quantized checkpoint.

    It links to the policy in `full_precision`, or else to its `base_model`, if the Hub has it.
    """
    relation = None
    if full_precision:
        relation = "quantized"
    elif base_model:
        relation = "finetune"
    formats = [scheme.name for scheme in plan.targets]
    data = ModelCardData(
        base_model=full_precision or base_model,
        base_model_relation=relation,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["trl", "qurl", *formats, "compressed-tensors", "vllm"],
    )
    text = f"A policy trained with trl-qurl, {described(plan)}."
    command = f"vllm serve {name}"
    if adapter_rank:
        text += (
            " The policy is this base with the adapter in `adapter`: request the model `policy` "
            "from the server."
        )
        command += (
            f" --enable-lora --max-lora-rank {adapter_rank} --lora-modules policy={name}/adapter"
        )
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n# {name}\n\n{text}\n\n```bash\n{command}\n```\n"
    )


def described(plan: QuantizationPlan) -> str:
    """Return a plan's formats and the modules that it leaves in full precision, in words."""
    if not plan.schemes:
        return "not quantized"
    exact = ", ".join(f"`{pattern}`" for pattern in plan.ignore)
    return f"quantized ({plan.description}; exact: {exact or 'none'})"
