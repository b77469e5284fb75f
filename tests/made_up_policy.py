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

    def __init__(
        self,
        accelerator,
        group_size,
        prompts,
        useful=tells_apart,
        weights=(1.0, 0.5),
    ):
        self.accelerator = accelerator
        self.group_size = group_size
        self.useful = useful
        self.rounds: list[int] = []  # completions made in each, in this process
        self._pending_extra_logs: dict[str, list] = {}
        self.sampler = DynamicSampler(
            group_size,
            lambda rewards: weighted_sum(rewards, torch.tensor(weights)),
            prompts,
            accelerator,
        )

    def _generate(self, prompts):
        self.rounds.append(len(prompts))
        offset = len(prompts) * self.accelerator.process_index
        places = [(offset + i) % self.group_size for i in range(len(prompts))]
        texts = [f"{prompt}, answer {place}" for prompt, place in zip(prompts, places, strict=True)]
        ids = [[ord(character) for character in text] for text in texts]
        logps = [[-1.0] * len(line) for line in ids]
        listings = [Listing.of(*rows, len(rows[0])) for rows in zip(logps, ids, strict=True)]
        samples = Samples([[1]] * len(prompts), ids, listings, has_images=False)
        self.vllm_generation = SimpleNamespace(samples=samples)
        return [[1]] * len(prompts), ids, None, texts, logps, {}, None, []

    def _calculate_rewards(self, rows, prompts, completions, completion_ids):
        assert [row["prompt"] for row in rows] == prompts
        rewards = []
        for row, text in zip(rows, completions, strict=True):
            assert text.startswith(row["prompt"] + ",")
            # The first completion of a useful group differs; the second reward is the row's number,
            # equal within a group.
            rewards.append([float(self.useful(row) and text.endswith("0")), row["number"]])
        self._pending_extra_logs["seen"] = [f"saw {text}" for text in completions]
        return self.accelerator.gather(torch.tensor(rewards))

    def fill(self, rows):
        filled = self.sampler.fill(rows, self)
        assert not self._pending_extra_logs, "columns of completions that are not in the batch"
        return filled
