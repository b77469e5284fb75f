"""What the tests of losses share: a trainer in this process, random batches, log-probabilities and
gradients.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest
import torch
from datasets import Dataset
from tiny import ENGINE
from trl import GRPOTrainer

from trl_qurl import QuRLGRPOTrainer

SETTINGS = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "vllm_max_model_length": 64,
    "vllm_engine_kwargs": ENGINE,
}
PROMPTS = ["ab", "cd", "ef", "gh"]
ROWS = [{"prompt": prompt} for prompt in PROMPTS for _ in range(4)]
CAP, EPSILON_LOW, EPSILON_HIGH = 2.0, 0.2, 0.28

Batch = dict[str, Any]
Tensors = dict[str, torch.Tensor]


class OwnPass(QuRLGRPOTrainer):
    """A forward pass without a call of the parent."""

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple:
        return GRPOTrainer._get_per_token_logps_and_entropies(self, model, *args, **kwargs)


def vowels(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(completion.count(vowel) for vowel in "aeiou4567") / 8 for completion in completions]


def ready(trainer: Any) -> Any:
    """Return a new trainer, set to train."""
    trainer.model.train()
    return trainer


def build(kind: Any, directory: Any, model: Any, reward: Any, *others: Any, **settings: Any) -> Any:
    """Return a new GRPO or RLOO trainer of four prompts with four completions each, its arguments
    in TRL's order.
    """
    config = kind._config_class(
        str(directory),
        per_device_train_batch_size=4,
        steps_per_generation=4,
        num_generations=4,
        max_completion_length=8,
        epsilon=EPSILON_LOW,
        epsilon_high=EPSILON_HIGH,
        **SETTINGS | settings,
    )
    return ready(kind(model, reward, config, Dataset.from_dict({"prompt": PROMPTS}), *others))


def random_batch(lengths: torch.Tensor, longest: int) -> Batch:
    """Prompts of three tokens, and completions of these lengths, padded to the longest."""
    torch.manual_seed(0)
    size = len(lengths)
    return {
        "prompt_ids": torch.randint(2, 90, (size, 3)),
        "prompt_mask": torch.ones(size, 3, dtype=torch.long),
        "completion_ids": torch.randint(2, 90, (size, longest)),
        "completion_mask": (torch.arange(longest) < lengths[:, None]).long(),
    }


def logps_of(trainer: Any, inputs: Batch) -> torch.Tensor:
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].size(1)
    return trainer._get_per_token_logps_and_entropies(
        trainer.model, input_ids, mask, length, compute_entropy=True
    )[0]


def our_loss(trainer: Any, batch: Batch) -> torch.Tensor:
    """The trainer's loss on a batch that was scored at rollout time."""
    return trainer._compute_loss(trainer.model, batch)


def gradients(trainer: Any, loss: torch.Tensor) -> Tensors:
    trainer.model.zero_grad()
    loss.backward()
    parameters = trainer.model.named_parameters()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def assert_equal(seen: Tensors, expected: Tensors) -> None:
    """All tensors are the same to the last bit."""
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


def assert_close(seen: Tensors, expected: Tensors, rtol: float, atol: float) -> None:
    """All gradients are the same; `atol` is a share of each one's largest value."""
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(seen[name], gradient, rtol=rtol, atol=atol * largest)


@contextmanager
def evaluating(trainer: Any) -> Iterator[None]:
    """Evaluate inside the block, without metrics from before."""
    trainer._metrics["eval"].clear()
    trainer.model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        trainer.model.train()


def give_invalid_logps(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, value: float, count: int | None = None
) -> None:
    """vLLM's log-probability of the first tokens is no number, or that of all of them."""
    llm = trainer.vllm_generation.llm
    generate = llm.generate

    def broken(*args: Any, **kwargs: Any) -> list:
        outputs = generate(*args, **kwargs)
        flats = [each.logprobs for output in outputs for each in output.outputs]
        places = [(flat.logprobs, start) for flat in flats for start in flat.start_indices]
        for logps, place in places[:count]:
            logps[place] = value
        return outputs

    monkeypatch.setattr(llm, "generate", broken)
