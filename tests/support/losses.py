"""What the tests of losses share: a trainer in this process, random batches, log-probabilities and
gradients.
"""

import os
import re

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from datasets import Dataset
from tiny import ENGINE
from trl import GRPOTrainer

from support.configs import PLAIN
from trl_qurl import QuRLGRPOTrainer

SETTINGS = {
    **PLAIN,
    "vllm_max_model_length": 64,
    "vllm_engine_kwargs": ENGINE,
}
PROMPTS = ["ab", "cd", "ef", "gh"]
ROWS = [{"prompt": prompt} for prompt in PROMPTS for _ in range(4)]
CAP = 2.0
EPSILON_LOW = 0.2
EPSILON_HIGH = 0.28


class OwnPass(QuRLGRPOTrainer):
    """A forward pass without a call of the parent."""

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        return GRPOTrainer._get_per_token_logps_and_entropies(self, model, *args, **kwargs)


def vowels(completions, **kwargs):
    rewards = []
    for completion in completions:
        found = re.findall("[aeiou4567]", completion)
        rewards.append(len(found) / 8)
    return rewards


def ready(trainer):
    """Return a new trainer, set to train."""
    trainer.model.train()
    return trainer


def build(kind, directory, model, reward, *others, **settings):
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


def random_batch(lengths, longest):
    """Prompts of three tokens, and completions of these lengths, padded to the longest."""
    torch.manual_seed(0)
    size = len(lengths)
    return {
        "prompt_ids": torch.randint(2, 90, (size, 3)),
        "prompt_mask": torch.ones(size, 3, dtype=torch.long),
        "completion_ids": torch.randint(2, 90, (size, longest)),
        "completion_mask": (torch.arange(longest) < lengths[:, None]).long(),
    }


def logps_of(trainer, inputs):
    input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].size(1)
    return trainer._get_per_token_logps_and_entropies(
        trainer.model, input_ids, mask, length, compute_entropy=True
    )[0]


def micro_batch(batch, rows):
    """Return these rows of a rollout."""
    chosen = {}
    for name, part in batch.items():
        chosen[name] = part[rows] if part.dim() else part
    return chosen


def score(batch, proximal_logps, log_rho):
    """Add log-probabilities of the policy and the engine, whose ratio is ρ; one token has none of
    the engine's.
    """
    behavior_logps = proximal_logps - log_rho
    behavior_logps[0, 3] = torch.nan
    # Padding holds whatever TRL padded with: its ratio must reach neither loss nor metrics.
    behavior_logps[batch["completion_mask"] == 0] = 1000.0
    batch["old_per_token_logps"] = proximal_logps
    batch["sampling_per_token_logps"] = behavior_logps


def our_loss(trainer, batch):
    """The trainer's loss on a batch that was scored at rollout time."""
    return trainer._compute_loss(trainer.model, batch)


def gradients(trainer, loss):
    trainer.model.zero_grad()
    loss.backward()
    parameters = trainer.model.named_parameters()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def assert_equal(seen, expected):
    """All tensors are the same to the last bit."""
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


def assert_close(seen, expected, rtol, atol):
    """All gradients are the same; `atol` is a share of each one's largest value."""
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = gradient.abs().max().item()
        torch.testing.assert_close(seen[name], gradient, rtol=rtol, atol=atol * largest)


def give_invalid_logps(trainer, monkeypatch, value, count):
    """vLLM's log-probability of the first tokens is no number."""
    llm = trainer.vllm_generation.llm
    generate = llm.generate

    def broken(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        places = []
        for output in outputs:
            for completion in output.outputs:
                flat = completion.logprobs
                places += [(flat.logprobs, start) for start in flat.start_indices]
        for logps, place in places[:count]:
            logps[place] = value
        return outputs

    monkeypatch.setattr(llm, "generate", broken)
