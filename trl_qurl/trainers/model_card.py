"""Model cards: the paper, for TRL's card of a run, and the card of a quantized checkpoint."""

from huggingface_hub import ModelCard, ModelCardData

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
