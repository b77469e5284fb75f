"""DAPO's dynamic sampling: fills a batch with groups of different rewards.

Source: arXiv:2503.14476, Eq. 11. It calls TRL's methods that generate and score a batch in rounds.
The `G` completions of a prompt form a group. Groups are numbered across all processes in the order
of TRL's batches, and may straddle two processes.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from trl_qurl.rollout.results import Generated
from trl_qurl.rollout.samples import Listing, Samples

logger = get_logger(__name__)  # logs in the main process only

MAX_ROUNDS = 10  # of generation for one batch, including the first: verl's limit for DAPO
ZERO_SPREAD = 1e-8  # TRL's tolerance for a standard deviation of 0


class DrawnPrompt(NamedTuple):
    """A row of the dataset."""

    row: dict[str, Any]
    drawn: int  # rows drawn so far, including it


@dataclass
class PromptStream:
    """The dataset's rows, reshuffled every epoch in an order that all processes share."""

    dataset: Any
    seed: int
    drawn: int = 0  # rows drawn so far; set it to continue after them

    def draw(self, count: int, columns: Collection[str], tried: set[str]) -> list[DrawnPrompt]:
        """Draw `count` rows that were not tried, or fewer if none are left; add them to `tried`.

        Args:
            count: How many.
            columns: Of a batch's rows, without those that `remove_unused_columns` removes.
            tried: `row_digest` of the rows that a batch has used up: TRL passes no index of them.
        """
        prompts: list[DrawnPrompt] = []
        for _ in range(2 * len(self.dataset)):  # the rest of this epoch plus one full epoch
            if len(prompts) == count:
                break
            epoch, position = divmod(self.drawn, len(self.dataset))
            index = int(epoch_order(len(self.dataset), self.seed, epoch)[position])
            self.drawn += 1
            values = self.dataset[index]
            row = {name: value for name, value in values.items() if name in columns}
            digest = row_digest(row)
            if digest not in tried:
                tried.add(digest)
                prompts.append(DrawnPrompt(row, self.drawn))
        return prompts


@functools.lru_cache(maxsize=1)  # `draw` reads one order many times
def epoch_order(size: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the indices of an epoch's prompts in the order they are drawn, (size,)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(size, generator=generator)


def row_digest(row: dict[str, Any]) -> str:
    """Return a short hash of all columns of a row."""
    return hashlib.blake2b(json.dumps(row, default=str).encode(), digest_size=8).hexdigest()


class Sample(NamedTuple):
    """One completion, with everything that TRL's two methods return about it."""

    row: dict[str, Any]  # of the dataset
    prompt_ids: list[int]
    completion_ids: list[int]
    completion: Any  # text or conversation
    logps: list[float | None] | None  # of the sampled tokens, in nats
    listing: Listing  # of the engine


@dataclass(frozen=True)
class FilledBatch:
    """The completions of one round, or a batch assembled from several."""

    samples: list[Sample]  # of this process
    rewards: torch.Tensor  # of all processes, (B, functions)
    metrics: dict[str, float] = field(default_factory=dict)  # cost of filling, over all processes

    def generated(self) -> Generated:
        """Return what TRL's `_generate` would have returned for these prompts, without tools."""
        logps = [sample.logps for sample in self.samples if sample.logps is not None]
        return Generated(
            prompt_ids=[sample.prompt_ids for sample in self.samples],
            completion_ids=[sample.completion_ids for sample in self.samples],
            tool_mask=None,
            completions=[sample.completion for sample in self.samples],
            logprobs=logps if len(logps) == len(self.samples) else None,
            extra_fields={},
            images=None,
            tool_images=[],
        )

    def as_samples(self) -> Samples:
        """Return the batch as if the engine had sampled it at once."""
        return Samples(
            prompts=[sample.prompt_ids for sample in self.samples],
            completions=[sample.completion_ids for sample in self.samples],
            listings=[sample.listing for sample in self.samples],
            has_images=False,
        )


@dataclass
class DynamicSampler:
    """Sampler that fills batches with groups whose rewards differ."""

    group_size: int  # G
    judge: Callable[[torch.Tensor], torch.Tensor]  # from rewards, (N, functions), to one each, (N,)
    prompts: PromptStream
    accelerator: Accelerator

    def fill(self, rows: list[dict[str, Any]], trainer: Any) -> FilledBatch:
        """Fill a batch with completions from `trainer`; groups of equal rewards are replaced.

        Every process must call this with its own rows of the batch, one per completion.
        """
        rounds = [sample_batch(rows, trainer)]
        batch = FilledBatch(list(rounds[0].samples), rounds[0].rewards.clone())
        useful = self._useful(batch)  # (groups,)
        columns = rows[0].keys()
        tried = set(gather_object([row_digest(row) for row in rows]))
        while len(rounds) < MAX_ROUNDS and not useful.all():
            open_slots = (~useful).nonzero().flatten().tolist()
            share = torch.cat([self._useful(each) for each in rounds]).double().mean().item()
            count = self._size_of_round(len(open_slots), share, len(useful))
            prompts = self._draw(count, columns, tried)
            if not prompts:
                break
            rounds.append(sample_batch(self._rows_of_this_process(prompts), trainer))
            new_groups = self._useful(rounds[-1]).nonzero().flatten().tolist()
            slots = dict(zip(new_groups, open_slots, strict=False))
            self._place(rounds[-1], slots, batch)
            useful[list(slots.values())] = True
            if useful.all():
                # Return unused prompts to the stream. Otherwise the training data would depend on
                # the size of a round, and with it on the number of processes.
                self.prompts.drawn = prompts[max(slots)].drawn
        if not useful.all():
            logger.warning_once(
                "Dynamic sampling could not fill a batch with groups of different rewards in "
                f"{MAX_ROUNDS} rounds, or ran out of prompts: the questions may be too easy or too "
                "hard (dynamic_sampling/filled_share)."
            )
        decisive = self.judge(torch.cat([each.rewards for each in rounds]))  # (N,)
        metrics = {
            "dynamic_sampling/rounds": float(len(rounds)),
            "dynamic_sampling/discarded_share": 1 - len(batch.rewards) / len(decisive),
            "dynamic_sampling/filled_share": useful.float().mean().item(),
            "dynamic_sampling/unfiltered_reward": decisive.nanmean().item(),
        }
        return FilledBatch(batch.samples, batch.rewards, metrics)

    def _useful(self, batch: FilledBatch) -> torch.Tensor:
        return informative(self.judge(batch.rewards), self.group_size)

    def _size_of_round(self, missing: int, share: float, groups: int) -> int:
        """Return how many prompts are enough if the share of useful groups stays as it is."""
        least_share = 1 / 8  # a smaller one is not a reliable estimate
        return min(groups, math.ceil(missing / max(share, least_share)))

    def _draw(self, count: int, columns: Collection[str], tried: set[str]) -> list[DrawnPrompt]:
        """Draw `count` prompts, and as many more as all processes need for equal shares."""
        processes = self.accelerator.num_processes
        step = processes // math.gcd(processes, self.group_size)
        prompts = self.prompts.draw(math.ceil(count / step) * step, columns, tried)
        return prompts[: len(prompts) // step * step]

    def _rows_of_this_process(self, prompts: list[DrawnPrompt]) -> list[dict[str, Any]]:
        """Return a round's rows for this process, one per completion."""
        rows = [prompt.row for prompt in prompts for _ in range(self.group_size)]
        with self.accelerator.split_between_processes(rows) as own:
            return own

    def _place(self, source: FilledBatch, slots: dict[int, int], batch: FilledBatch) -> None:
        """Copy groups of a round into slots of the batch.

        That is all rewards, and the samples that belong to this process.
        """
        samples = gather_object(source.samples)  # of all processes, as the rewards are
        start = self.accelerator.process_index * len(batch.samples)
        for group, slot in slots.items():
            for i in range(self.group_size):
                origin = group * self.group_size + i
                target = slot * self.group_size + i
                batch.rewards[target] = source.rewards[origin]
                if start <= target < start + len(batch.samples):
                    batch.samples[target - start] = samples[origin]


def sample_batch(rows: list[dict[str, Any]], trainer: Any) -> FilledBatch:
    """Return a completion for each row from `trainer`, with its rewards."""
    prompts = [row["prompt"] for row in rows]
    generated = Generated(*trainer._generate(prompts))
    completion_ids = generated.completion_ids
    listings = trainer.vllm_generation.samples.listings
    rewards = trainer._calculate_rewards(rows, prompts, generated.completions, completion_ids)
    trainer._pending_extra_logs.clear()  # of completions that the batch may not keep
    samples = []
    for i, row in enumerate(rows):
        sample = Sample(
            row=row,
            prompt_ids=generated.prompt_ids[i],
            completion_ids=completion_ids[i],
            completion=generated.completions[i],
            logps=None if generated.logprobs is None else generated.logprobs[i],
            listing=listings[i],
        )
        samples.append(sample)
    return FilledBatch(samples, rewards)


def informative(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return which groups have different rewards, bool (N / G,). NaN is a missing score."""
    groups = rewards.view(-1, group_size)  # (groups, G)
    missing = groups.isnan()
    largest = groups.masked_fill(missing, -math.inf).amax(1)
    smallest = groups.masked_fill(missing, math.inf).amin(1)  # the difference is -inf without any
    return largest - smallest > ZERO_SPREAD
