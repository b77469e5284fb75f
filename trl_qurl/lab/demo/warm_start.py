"""Supervised training from scratch to an accuracy of about 47 %, which leaves room for RL.

The result is cached under a hash of its settings and code, so a stale policy is never used.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.lab.demo import evaluate, task
from trl_qurl.quantization.files import cached, new_directory

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM


@dataclass(frozen=True)
class WarmStartSettings:
    """Training settings and stopping criterion of the warm start."""

    # expected accuracy on held-out problems; training stops at the first evaluation to reach it
    target: float = 0.45
    max_updates: int = 1500
    evaluate_every: int = 10  # updates; the rise from 6 % to 46 % takes about 50
    batch_size: int = 256
    learning_rate: float = 2e-3
    warm_up_updates: int = 20
    seed: int = 0


def cached_warm_start(settings: WarmStartSettings, cache_dir: Path) -> Path:
    """Return the directory of the warm-started policy and its tokenizer, trained if need be."""

    def make(path: Path) -> None:
        tokenizer = task.build_tokenizer()
        policy = train_warm_start(settings, tokenizer)
        with new_directory(path) as tmp:
            policy.save_pretrained(tmp)
            tokenizer.save_pretrained(tmp)

    return cached(cache_dir / f"warm-start-{fingerprint(settings)}" / "tiny-qwen2", make)


def fingerprint(settings: WarmStartSettings) -> str:
    """Hash the settings and the source files that determine the result."""
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode())
    for path in (task.__file__, __file__):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]


def train_warm_start(
    settings: WarmStartSettings, tokenizer: PreTrainedTokenizerFast
) -> Qwen2ForCausalLM:
    """Train on fresh problems until the expected accuracy on held-out ones reaches the target."""
    import torch

    print(
        "Warm start, once: supervised training on right answers. Accuracy jumps near update 500.",
        flush=True,
    )
    policy = build_model(tokenizer, settings.seed)
    held_out = task.encode_problems(task.sample_problems(512, seed=0, held_out=True), tokenizer)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98))
    accuracy = 0.0
    warm_up = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1 / settings.warm_up_updates, 1, settings.warm_up_updates
    )
    for update in range(1, settings.max_updates + 1):
        # A separate seed per update makes each batch independent of how many problems were rejected
        # before.
        seed = settings.seed * 1_000_000 + update
        problems = task.sample_problems(settings.batch_size, seed)
        loss = answer_loss(policy, task.encode_problems(problems, tokenizer))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm=1.0)
        optimizer.step()
        warm_up.step()
        if update % settings.evaluate_every == 0:
            accuracy = evaluate.measure_policy(policy, held_out).expected
            is_done = accuracy >= settings.target
            if update % 100 == 0 or is_done:
                print(f"Warm start, update {update}: accuracy {accuracy:.3f}", flush=True)
            if is_done:
                return policy
    raise ValueError(
        f"The warm start reached an accuracy of {accuracy:.2f} in "
        f"max_updates={settings.max_updates}, below target={settings.target}: raise the first, "
        "or lower the second."
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, width: int = 128, layers: int = 3
) -> Qwen2ForCausalLM:
    """Build a random float32 Qwen2, by default with 0.47 million parameters.

    The same seed gives the same weights.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=task.VOCABULARY_SIZE,
        hidden_size=width,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).float()


def answer_loss(policy: Qwen2ForCausalLM, problem_ids: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the answer tokens, in nats, of problems (B, P + A)."""
    from torch.nn.functional import cross_entropy

    logits = policy(input_ids=problem_ids[:, :-1]).logits[:, task.PROMPT_TOKENS - 1 :]  # (B, A, V)
    answer_ids = problem_ids[:, task.PROMPT_TOKENS :]  # (B, A)
    return cross_entropy(logits.flatten(0, 1), answer_ids.flatten())
