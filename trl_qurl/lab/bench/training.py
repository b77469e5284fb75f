"""Measure the cost of learning from a rollout: scoring, forward and backward passes, optimizer steps.

The passes match TRL's trainer: 32-bit weights with 16-bit autocast on a GPU (and on a CPU with instructions for it),
and TRL's output head, which scores only the completions and never materializes all logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from trl_qurl.lab.bench.prediction import Timing, TrainingCosts
from trl_qurl.lab.bench.workload import BUDGET, REPEATS, Job, Workload
from trl_qurl.lab.device import cpu_settings, full_precision

GRADIENT_NORM = 1.0
NOT_SCORED = -100


def half_precision() -> torch.dtype:
    """Return the 16-bit dtype of the engine and the passes."""
    return getattr(torch, full_precision()[1])


def build_policy(config_dir: str, device: torch.device, lora_rank: int = 0) -> Any:
    """Build the model with random float32 weights, as in a trainer, and a new adapter if `lora_rank` > 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(config_dir)
    with device:
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy.config.architectures = [type(policy).__name__]
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(policy, LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    return policy


def measure_training(job: Job) -> TrainingCosts:
    """Time scoring, updates and the optimizer, at sizes that the budget allows."""
    workload = job.workload
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = build_policy(job.config_dir, device, workload.lora_rank)
    prepare_policy(policy)

    def score(rows: int) -> None:
        with torch.no_grad():
            log_probabilities(policy, rows, workload)

    def update(rows: int) -> None:
        log_probabilities(policy, rows, workload).mean().backward()

    scoring, updating = (time_passes(action, workload, device) for action in (score, update))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=device.type == "cuda")

    def step() -> float:
        started = seconds(device)
        torch.nn.utils.clip_grad_norm_(trained, GRADIENT_NORM)
        optimizer.step()
        return seconds(device) - started

    step()  # creates the optimizer's state
    return TrainingCosts(scoring, updating, Timing(1, [step() for _ in range(REPEATS)]))


def prepare_policy(policy: Any) -> None:
    """Set up a policy to run its passes as in TRL's trainer, with gradient checkpointing."""
    from trl.trainer import add_fused_lm_head

    policy.train()
    model = getattr(policy, "get_base_model", lambda: policy)()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.config.use_cache = False


def log_probabilities(policy: Any, rows: int, workload: Workload) -> torch.Tensor:
    """Compute log-probabilities of the completions (rows, completion_len) in random sequences."""
    vocabulary = policy.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, (rows, workload.length), device=policy.device)
    labels = tokens.clone()
    labels[:, : workload.prompt_len] = NOT_SCORED
    is_16_bit = policy.device.type == "cuda" or cpu_settings().get("bf16")
    autocast = torch.autocast(policy.device.type, half_precision()) if is_16_bit else nullcontext()
    with autocast:
        outputs = policy(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -workload.completion_len :]


def time_passes(action: Callable[[int], None], workload: Workload, device: torch.device) -> Timing:
    """Time passes over as many of the completions of a whole pass as the budget allows."""

    def duration(rows: int) -> float:
        started = seconds(device)
        action(rows)
        return seconds(device) - started

    duration(1)  # warm-up
    rows = max(1, min(workload.train_batch, int(BUDGET / REPEATS / duration(1))))
    return Timing(rows * workload.length, [duration(rows) for _ in range(REPEATS)])


def seconds(device: torch.device) -> float:
    """Read the clock after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
