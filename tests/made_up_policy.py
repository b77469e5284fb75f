"""A policy and a reward without a model, for tests of dynamic sampling: every third prompt tells
its answers apart.
"""

from types import SimpleNamespace

import torch

from trl_qurl.advantages import weighted_sum
from trl_qurl.rollout.samples import Listing, Samples
from trl_qurl.trainers.dynamic_sampling import DynamicSampler

ROWS = [{"prompt": f"question {number}", "number": number} for number in range(60)]


def tells_apart(row):
    """Whether this prompt's completions get rewards that differ."""
    return row["number"] % 3 == 0


class MadeUpPolicy:
    """
    Answers each prompt with a text that names it, and the place of the completion within its group.

    It has what dynamic sampling asks of a trainer.

    Args:
        accelerator: Whose processes share the work.
        group_size: Completions per prompt.
        prompts: For replacement.
        useful: Which rows' rewards differ.
    """

    def __init__(self, accelerator, group_size, prompts, useful=tells_apart):
        self.accelerator = accelerator
        self.group_size = group_size
        self.useful = useful
        self.rounds = []  # completions made in each, in this process
        self._pending_extra_logs = {}
        self.sampler = DynamicSampler(
            group_size,
            lambda rewards: weighted_sum(rewards, torch.tensor([1.0, 0.5])),
            prompts,
            accelerator,
        )

    def _generate(self, prompts):
        self.rounds.append(len(prompts))
        offset = len(prompts) * self.accelerator.process_index
        texts = []
        ids = []
        logps = []
        listings = []
        for number, prompt in enumerate(prompts, offset):
            text = f"{prompt}, answer {number % self.group_size}"
            tokens = list(text.encode())
            token_logps = [-1.0] * len(tokens)
            texts.append(text)
            ids.append(tokens)
            logps.append(token_logps)
            listings.append(Listing.of(token_logps, tokens, len(tokens)))
        prompt_ids = [[1]] * len(prompts)
        samples = Samples(prompt_ids, ids, listings, has_images=False)
        self.vllm_generation = SimpleNamespace(samples=samples)
        return prompt_ids, ids, None, texts, logps, {}, None, []

    def _calculate_rewards(self, rows, prompts, completions, completion_ids):
        assert [row["prompt"] for row in rows] == prompts
        rewards = []
        for row, text in zip(rows, completions, strict=True):
            assert text.startswith(row["prompt"] + ",")
            # The first completion of a useful group differs; the second reward is the row's number,
            # equal within a group.
            differs = self.useful(row) and text.endswith("0")
            rewards.append([float(differs), row["number"]])
        self._pending_extra_logs["seen"] = [f"saw {text}" for text in completions]
        return self.accelerator.gather(torch.tensor(rewards))

    def fill(self, rows):
        filled = self.sampler.fill(rows, self)
        assert not self._pending_extra_logs, "columns of completions that are not in the batch"
        return filled
