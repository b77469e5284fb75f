"""Arguments of an engine that users cannot set, and why."""

import json
from collections.abc import Collection
from typing import Any

TAKEN_ENGINE_ARGUMENTS = {
    "model": "the trainer's `model`",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
    "max_num_seqs": "per_device_train_batch_size and steps_per_generation",
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "model_impl": "vllm_model_impl",
    "distributed_executor_backend": "the launcher (TRL fixes it)",
    "max_num_batched_tokens": "TRL, which fixes it at 4096",
    "logprobs_mode": "trl-qurl (the importance ratio needs 'processed_logprobs')",
    "quantization": "rollout_quantization",
    "quantization_config": "rollout_quantization",
    "trust_remote_code": "trust_remote_code",
    "enable_lora": "weight_sync",
    "max_lora_rank": "peft_config",
    "worker_extension_cls": "trl-qurl (its worker loads the weights)",
}
"""Arguments of the colocated engine that users cannot set, and what governs them."""

DISTRIBUTION = (
    "it changes the distribution that tokens are sampled from, and the trainer computes another one"
)
ENDS = (
    "the trainer's settings decide how tokens are sampled, and "
    "model.generation_config.eos_token_id where they end"
)
UNFOLLOWED = {
    "logits_processors": DISTRIBUTION,
    "speculative_config": (
        "no sync updates a draft model, and what an old one drafts is rarely taken, so that "
        "rollouts become slower"
    ),
    "generation_config": ENDS,
    "override_generation_config": ENDS,
}
"""Arguments of an engine that make it sample what the trainer cannot score, and why."""


def read_engine_kwargs(kwargs: Any) -> dict[str, Any]:
    """Return `vllm_engine_kwargs` as a dictionary; the command line passes JSON.

    Raises `ValueError` for arguments that something else governs, or that the trainer cannot
    follow.
    """
    try:
        arguments = dict(json.loads(kwargs) if isinstance(kwargs, str) else kwargs or {})
    except (TypeError, ValueError):
        raise ValueError(
            f"vllm_engine_kwargs is {kwargs!r}: write a JSON dictionary, such as "
            '{"enforce_eager": true}.'
        ) from None
    for name, governor in TAKEN_ENGINE_ARGUMENTS.items():
        if name in arguments:
            raise ValueError(
                f"vllm_engine_kwargs sets {name!r}, but that is governed by {governor}. Remove it."
            )
    check_followed(arguments, "vllm_engine_kwargs")
    return arguments


def check_followed(names: Collection[str], source: str) -> None:
    """Raise `ValueError` for arguments that the trainer cannot follow; `source` sets them."""
    for name, reason in UNFOLLOWED.items():
        if name in names:
            raise ValueError(f"{source} sets {name!r}, but {reason}. Remove it.")
