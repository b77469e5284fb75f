"""A tiny random policy that needs no download, and a trainer for three steps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trl_qurl import QuRLGRPOTrainer

STEPS = 3
BATCH = 8
PROMPTS = 64

SIZES = {
    "vocab_size": 128,
    "hidden_size": 256,  # num_attention_heads * head_dim, which vLLM assumes for this family
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # supported by all attention kernels
    "max_position_embeddings": 128,
}
"""Sizes of the policy; all layers are multiples of 128, the size of groups, blocks and kernel tiles."""

PADDED_SIZES = {"vocab_size": 131, "intermediate_size": 200}
"""Sizes that vLLM pads: the vocabulary to a multiple of 64, and, for some kernels, matrices to a multiple of 16."""


def build_policy(**sizes: int) -> PreTrainedModel:
    """Build a random Qwen2 whose biases and norms are perturbed, so losing one is noticed."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        **{**SIZES, **sizes}, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None
    )
    policy = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def even_tokens(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """Reward function that differs between completions: the share of even token ids."""
    return [sum(token % 2 == 0 for token in tokens) / max(1, len(tokens)) for tokens in completion_ids]


def build_trainer(
    scheme: str | None, policy: PreTrainedModel | None = None, engine: dict[str, Any] | None = None, **changed: Any
) -> QuRLGRPOTrainer:
    """Build a trainer that checks every sync with digests and a probe.

    Args:
        scheme: Rollout format.
        policy: Model to train; defaults to `build_policy()`.
        engine: Extra arguments for the colocated engine.
        **changed: Settings to override, by name in the config.
    """
    import torch
    from datasets import Dataset

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
    from trl_qurl.lab.demo.task import build_tokenizer, sample_problems
    from trl_qurl.lab.device import full_precision

    has_gpu, dtype = torch.cuda.is_available(), full_precision()[1]
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="trl-qurl-doctor-"),
        "rollout_quantization": scheme,
        "objective": "tis",  # with one update per rollout, nothing is ever clipped
        "sync_check_interval": 1,
        "weight_metrics_interval": 1,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": BATCH,
        "num_generations": BATCH // 2,
        "steps_per_generation": 1,
        "max_completion_length": 8,
        "max_steps": STEPS,
        "logging_steps": 1,
        "bf16": has_gpu and dtype == "bfloat16",
        "fp16": has_gpu and dtype == "float16",
        "use_cpu": not has_gpu,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "vllm_max_model_length": 64,
    }
    if changed.get("vllm_mode") != "server":
        minimal = {"dtype": dtype, "enforce_eager": True, "kv_cache_memory_bytes": 2**26}
        settings["vllm_engine_kwargs"] = {**minimal, **(engine or {})}
    return QuRLGRPOTrainer(
        model=policy if policy is not None else build_policy(),
        reward_funcs=even_tokens,
        args=QuRLGRPOConfig(**{**settings, **changed}),
        train_dataset=Dataset.from_dict({"prompt": [problem.prompt for problem in sample_problems(PROMPTS, seed=0)]}),
        processing_class=build_tokenizer(),
    )


def save_policy(policy: PreTrainedModel, directory: Path) -> None:
    """Save the policy with its tokenizer, for a server."""
    from trl_qurl.lab.demo.task import build_tokenizer

    policy.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
