"""A tiny policy, made here and not loaded from anywhere, and a trainer for three steps of it."""

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
    "hidden_size": 256,  # heads times their width, as vLLM takes it to be for this family
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # all attention kernels have it
    "max_position_embeddings": 128,
}
"""Of the policy; every layer has multiples of the 128 that groups, blocks and tiles of kernels have."""

PADDED_SIZES = {"vocab_size": 131, "intermediate_size": 200}
"""Sizes that vLLM pads: a vocabulary to a multiple of 64, and a matrix that is no multiple of 16 for some kernels."""


def build_policy(**sizes: int) -> PreTrainedModel:
    """A random Qwen2 with biases and norms that are not neutral, so that losing one is noticed."""
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
    """A reward that differs between completions: the share of tokens with even numbers."""
    return [sum(token % 2 == 0 for token in tokens) / max(1, len(tokens)) for tokens in completion_ids]


def build_trainer(
    scheme: str | None, policy: PreTrainedModel | None = None, engine: dict[str, Any] | None = None, **changed: Any
) -> QuRLGRPOTrainer:
    """A trainer whose every sync is checked by digests and probe.

    Args:
        scheme: Format of the rollouts.
        policy: Model to train; by default that of `build_policy`.
        engine: Further arguments of the colocated engine.
        **changed: Settings by their names in the config.
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
        "objective": "tis",  # with one update per rollout there is nothing to clip
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
        least = {"dtype": dtype, "enforce_eager": True, "kv_cache_memory_bytes": 2**26}
        settings["vllm_engine_kwargs"] = {**least, **(engine or {})}
    return QuRLGRPOTrainer(
        model=policy if policy is not None else build_policy(),
        reward_funcs=even_tokens,
        args=QuRLGRPOConfig(**{**settings, **changed}),
        train_dataset=Dataset.from_dict({"prompt": [problem.prompt for problem in sample_problems(PROMPTS, seed=0)]}),
        processing_class=build_tokenizer(),
    )


def save_policy(policy: PreTrainedModel, directory: Path) -> None:
    """Write the policy with its tokenizer, for a server."""
    from trl_qurl.lab.demo.task import build_tokenizer

    policy.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
