"""Measure the cost of learning from a rollout: scoring, forward and backward passes, optimizer steps.

The passes match TRL's trainer: 32-bit weights with 16-bit autocast on a GPU (and on a CPU with instructions for it),
and TRL's output head, which scores only the completions and never materializes all logits.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from trl_qurl.lab.bench.costs import Timing, TrainingCosts
from trl_qurl.lab.bench.workload import Workload
from trl_qurl.lab.device import cpu_settings, full_precision

FIRST_TOKENS = 64
"""Tokens in the first pass of each kind; the number doubles with each pass."""

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


def measure_training(policy: Any, workload: Workload, budget: float) -> TrainingCosts:
    """Time scoring, updates and the optimizer, at sizes limited by a budget of seconds for each."""
    prepare_policy(policy, workload)

    def score(rows: int, length: int) -> None:
        with torch.no_grad():
            log_probabilities(policy, rows, length, workload)

    def update(rows: int, length: int) -> None:
        log_probabilities(policy, rows, length, workload).mean().backward()

    scoring = grow(policy, score, workload, budget)
    updating = grow(policy, update, workload, budget)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=policy.device.type == "cuda")

    def step() -> float:
        started = seconds(policy.device)
        torch.nn.utils.clip_grad_norm_(trained, GRADIENT_NORM)
        optimizer.step()
        return seconds(policy.device) - started

    step()  # creates the optimizer's state
    return TrainingCosts(scoring, updating, Timing(1, [step(), step()]))


def prepare_policy(policy: Any, workload: Workload) -> None:
    """Set up a policy to run its passes as in TRL's trainer."""
    from trl.trainer import add_fused_lm_head

    policy.train()
    add_fused_lm_head(policy.get_base_model() if workload.lora_rank else policy, outputs=("log_probs", "entropy"))
    if workload.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})  # as TRL does
        policy.config.use_cache = False


def log_probabilities(policy: Any, rows: int, length: int, workload: Workload) -> torch.Tensor:
    """Compute log-probabilities of the completion tokens in random sequences (rows, length)."""
    share = workload.completion_len / (workload.prompt_len + workload.completion_len)
    scored = max(1, round(share * length))
    tokens = torch.randint(0, policy.config.get_text_config().vocab_size, (rows, length), device=policy.device)
    labels = tokens.clone()
    labels[:, :-scored] = NOT_SCORED
    is_16_bit = policy.device.type == "cuda" or cpu_settings().get("bf16")
    autocast = torch.autocast(policy.device.type, half_precision()) if is_16_bit else nullcontext()
    with autocast:
        outputs = policy(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -scored:]


def grow(policy: Any, action: Any, workload: Workload, budget: float) -> list[Timing]:
    """Time passes with more and more tokens, until one is full-size or the next would exceed the budget."""
    full_length = workload.prompt_len + workload.completion_len
    timings: list[Timing] = []
    spent, length, rows = 0.0, min(FIRST_TOKENS, full_length), 1
    action(rows, length)  # warm-up
    while True:
        runs = []
        for _ in range(2):
            started = seconds(policy.device)
            action(rows, length)
            runs.append(seconds(policy.device) - started)
        timings.append(Timing(rows * length, runs))
        spent += sum(runs)
        if length < full_length:
            grown_rows, grown_length = rows, min(2 * length, full_length)
        elif rows < workload.train_batch:
            grown_rows, grown_length = min(2 * rows, workload.train_batch), length
        else:
            return timings
        growth = grown_rows * grown_length / (rows * length)
        if spent + growth * sum(runs) > budget:
            return timings
        rows, length = grown_rows, grown_length


def seconds(device: torch.device) -> float:
    """Read the clock after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
