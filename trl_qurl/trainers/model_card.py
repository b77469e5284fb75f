"""Model cards: a section about the rollouts for TRL's card, and
the card of a quantized checkpoint.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from trl_qurl.objective import OBJECTIVES
from trl_qurl.quantization.plan import QuantizationPlan

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


def add_rollouts(algorithm: str, args: Any, generation: Any) -> None:
    """Add a section about the rollouts to TRL's card in the output directory, from its config and
    backend.
    """
    objective = OBJECTIVES.get(vars(args).get("objective", ""))
    codes = described(generation.weights.plan)
    source = (
        "a copy of the policy"
        if generation.sync.route.is_merged
        else "the frozen base with the unmerged adapter"
    )
    sentences = [
        f"The algorithm is {algorithm}. vLLM generated the rollouts with {source}, {codes}."
    ]
    if args.round_base:
        sentences.append(
            "The adapter only works with a base whose weights are rounded to the values of these "
            "codes."
        )
    if objective is not None:
        sentences.append(f"The objective is `{objective.name}` ({objective.source}).")
    sentences.append("All settings are in `run.jsonl`.")
    card = ModelCard.load(path := Path(args.output_dir) / "README.md")
    head, mark, tail = card.text.partition("### Framework versions")
    base = Path(generation.model.config._name_or_path).name  # TRL only names models on the Hub
    head = head.replace("[None](https://huggingface.co/None)", f"`{base}`")
    head = head.replace('model="None"', f'model="{path.parent.name}"')
    vars(card.data).pop("licence", None)  # a placeholder
    card.text = "\n\n".join(
        [head.rstrip(), "### Quantized rollouts", " ".join(sentences), mark + tail]
    )
    card.save(path)


def quantized_card(
    name: str,
    plan: QuantizationPlan,
    full_precision: str | None,
    base_model: str | None,
    adapter_rank: int = 0,
) -> ModelCard:
    """Return the card of a quantized checkpoint, with a link to the policy, or its base, on the Hub
    if it is there.
    """
    data = ModelCardData(
        base_model=full_precision or base_model,
        base_model_relation="quantized" if full_precision else "finetune" if base_model else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[
            "trl",
            "qurl",
            *(scheme.name for scheme in plan.targets),
            "compressed-tensors",
            "vllm",
        ],
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
    return (
        f"quantized ({plan.description}; exact: "
        f"{', '.join(f'`{pattern}`' for pattern in plan.ignore) or 'none'})"
    )
