"""DAPO's dynamic sampling: fills a batch with groups whose rewards differ (arXiv:2503.14476, Eq. 11).

TRL generates and scores one batch of prompts. This module calls the same two methods in rounds and assembles a batch
for TRL to continue with. The `G` completions of a prompt form a group. Groups are numbered across all processes in the
order of TRL's batches, and may straddle two processes.
"""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

logger = logging.getLogger(__name__)

MAX_ROUNDS = 10
"""Rounds of generation for one batch, including the first: verl's limit for DAPO."""


class StreamPrompt(NamedTuple):
    """A prompt drawn from the stream."""

    row: dict[str, Any]
    position: int  # prompts drawn so far, including this one


class PromptStream:
    """The dataset's prompts, reshuffled every epoch in an order that all processes share.

    Set `drawn`, the prompts drawn so far, to continue after them.
    """

    def __init__(self, dataset: Any, seed: int, drawn: int = 0) -> None:
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                "dynamic_sampling=True cannot draw extra prompts from a streaming dataset: load it with "
                "streaming=False, or set dynamic_sampling=False."
            )
        self._dataset = dataset
        self._seed = seed
        self._epoch, self._order = -1, torch.empty(0)
        self.drawn = drawn

    def draw(self, count: int, tried: set[str]) -> list[StreamPrompt]:
        """Draw the next `count` prompts that are not in `tried`, and add them to it; fewer if none are left."""
        prompts: list[StreamPrompt] = []
        for _ in range(2 * len(self._dataset)):  # the rest of this epoch plus one full epoch
            if len(prompts) == count:
                break
            row = self._dataset[self._next_index()]
            self.drawn += 1
            digest = prompt_digest(row)
            if digest not in tried:
                tried.add(digest)
                prompts.append(StreamPrompt(row, self.drawn))
        return prompts

    def _next_index(self) -> int:
        epoch, position = divmod(self.drawn, len(self._dataset))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._dataset), generator=generator)
        return int(self._order[position])


def prompt_digest(row: dict[str, Any]) -> str:
    """Return a short hash of a row's prompt that processes can exchange."""
    return hashlib.blake2b(json.dumps(row["prompt"], default=str).encode(), digest_size=8).hexdigest()


class Sample(NamedTuple):
    """One completion, with everything that TRL's two methods return about it."""

    row: dict[str, Any]  # of the dataset
    prompt_ids: list[int]
    completion_ids: list[int]
    completion: Any  # text or conversation
    logps: list[float] | None  # of the sampled tokens, nats
    extras: dict[str, Any]  # columns that reward functions add to the table of completions


@dataclass(frozen=True)
class Batch:
    """The completions of one round, or a batch assembled from several."""

    samples: list[Sample]  # of this process
    rewards: torch.Tensor  # of all processes, (B, functions)
    metrics: dict[str, float] = field(default_factory=dict)  # cost of filling the batch, over all processes

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset rows of the samples."""
        return [sample.row for sample in self.samples]

    def generated(self) -> tuple:
        """Return what TRL's `_generate` would have returned for these prompts, without tools and images."""
        prompt_ids = [sample.prompt_ids for sample in self.samples]
        completion_ids = [sample.completion_ids for sample in self.samples]
        completions = [sample.completion for sample in self.samples]
        logps = None if self.samples[0].logps is None else [sample.logps for sample in self.samples]
        return prompt_ids, completion_ids, None, completions, logps, {}, None, []


class RolloutFunctions(NamedTuple):
    """A trainer's methods for generation and scoring, passed per batch so the sampler holds no trainer."""

    generate: Callable[[list], tuple]  # the trainer's `_generate`; returns the same as `Batch.generated`
    score: Callable[..., torch.Tensor]  # its `_calculate_rewards`; returns the rewards of all processes
    take_extras: Callable[[], dict[str, list]]  # returns and clears what reward functions added to the table


@dataclass
class DynamicSampler:
    """Sampler that fills batches with groups whose rewards differ."""

    group_size: int  # G
    judge: Callable[[torch.Tensor], torch.Tensor]  # maps rewards, (N, functions), to the one that decides, (N,)
    prompts: PromptStream
    accelerator: Accelerator
    _warned: bool = False

    def fill(self, rows: list[dict[str, Any]], functions: RolloutFunctions) -> Batch:
        """Generate a batch, and replace groups whose rewards are equal with groups of other prompts.

        Every process must call this with its own rows of the batch, one per completion.
        """
        rounds = [self._make_round(rows, functions)]
        batch = Batch(list(rounds[0].samples), rounds[0].rewards.clone())
        useful = self._useful(batch)  # (groups,)
        tried = {digest for part in gather_object([[prompt_digest(row) for row in rows]]) for digest in part}
        group_count, useful_count = len(useful), int(useful.sum())
        for _ in range(1, MAX_ROUNDS):
            open_slots = (~useful).nonzero().flatten().tolist()
            prompts = self._draw(len(open_slots), useful_count / group_count, len(useful), tried) if open_slots else []
            if not prompts:
                break
            rounds.append(self._make_round(self._share_out(prompts), functions))
            new = self._useful(rounds[-1])
            group_count, useful_count = group_count + len(new), useful_count + int(new.sum())
            slots = dict(zip(new.nonzero().flatten().tolist(), open_slots, strict=False))
            self._place(rounds[-1], slots, batch)
            useful[list(slots.values())] = True
            if useful.all():
                # Return unused prompts to the stream. Otherwise the training data would depend on the size of a round,
                # and with it on the number of processes.
                self.prompts.drawn = prompts[max(slots)].position
        self._warn_if_unfilled(useful, len(rounds))
        batch.metrics.update(self._metrics(rounds, batch.samples, useful))
        return batch

    def _useful(self, batch: Batch) -> torch.Tensor:
        return informative(self.judge(batch.rewards), self.group_size)

    def _make_round(self, rows: list[dict[str, Any]], functions: RolloutFunctions) -> Batch:
        prompts = [row["prompt"] for row in rows]
        prompt_ids, completion_ids, _, completions, logps, *_ = functions.generate(prompts)
        rewards = functions.score(rows, prompts, completions, completion_ids)
        # A column of another length cannot be matched to rows.
        columns = {name: column for name, column in functions.take_extras().items() if len(column) == len(rows)}
        extras = [{name: column[i] for name, column in columns.items()} for i in range(len(rows))]
        logps = [None] * len(rows) if logps is None else logps
        return Batch(list(map(Sample, rows, prompt_ids, completion_ids, completions, logps, extras)), rewards)

    def _draw(self, missing: int, share: float, groups: int, tried: set[str]) -> list[StreamPrompt]:
        """Draw prompts for the next round: enough if the share of useful groups stays as it is, at most a batch."""
        count = min(groups, math.ceil(missing / max(share, 1 / 8)))  # a smaller share is not a reliable estimate
        step = self.accelerator.num_processes // math.gcd(self.accelerator.num_processes, self.group_size)
        prompts = self.prompts.draw(-(-count // step) * step, tried)
        return prompts[: len(prompts) // step * step]  # every process must generate the same number of completions

    def _share_out(self, prompts: Sequence[StreamPrompt]) -> list[dict[str, Any]]:
        """Return this process's share of the prompts' groups, one row per completion."""
        rows = [prompt.row for prompt in prompts for _ in range(self.group_size)]
        size = len(rows) // self.accelerator.num_processes
        return rows[self.accelerator.process_index * size :][:size]

    def _place(self, source: Batch, slots: dict[int, int], batch: Batch) -> None:
        """Copy groups of a round into slots of the batch: all rewards, and the samples that belong to this process."""
        moves = {
            group * self.group_size + i: slot * self.group_size + i
            for group, slot in slots.items()
            for i in range(self.group_size)
        }
        index = self.accelerator.process_index
        source_start, batch_start = index * len(source.samples), index * len(batch.samples)
        outgoing = [(moves[i], sample) for i, sample in enumerate(source.samples, source_start) if i in moves]
        for target, sample in gather_object(outgoing):
            if batch_start <= target < batch_start + len(batch.samples):
                batch.samples[target - batch_start] = sample
        for origin, target in moves.items():
            batch.rewards[target] = source.rewards[origin]

    def _warn_if_unfilled(self, useful: torch.Tensor, rounds: int) -> None:
        if not useful.all() and not self._warned:
            self._warned = True
            logger.warning(
                "Dynamic sampling found only %d of %d groups with different rewards in %d rounds of generation: the "
                "questions may be too easy or too hard for the policy. Later batches are not reported, but logged as "
                "dynamic_sampling/filled_share.",
                int(useful.sum()),
                len(useful),
                rounds,
            )

    def _metrics(self, rounds: list[Batch], samples: list[Sample], useful: torch.Tensor) -> dict[str, float]:
        decisive = self.judge(torch.cat([each.rewards for each in rounds]))  # (N,)
        generated = [sample for each in rounds for sample in each.samples]
        discarded = sum(len(s.completion_ids) for s in generated) - sum(len(s.completion_ids) for s in samples)
        local = torch.tensor([float(discarded)], device=self.accelerator.device)
        return {
            "dynamic_sampling/rounds": float(len(rounds)),
            "dynamic_sampling/discarded_share": 1 - len(samples) * self.accelerator.num_processes / len(decisive),
            "dynamic_sampling/extra_tokens": self.accelerator.reduce(local, reduction="sum").item(),
            "dynamic_sampling/filled_share": useful.float().mean().item(),
            "dynamic_sampling/unfiltered_reward": decisive.nanmean().item(),
        }


def informative(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return which groups have different rewards, bool (N / G,); NaN, a missing score, is ignored."""
    groups = rewards.view(-1, group_size)  # (groups, G)
    missing = groups.isnan()
    largest = groups.masked_fill(missing, -math.inf).amax(1)
    smallest = groups.masked_fill(missing, math.inf).amin(1)
    return largest - smallest > 1e-8  # TRL's tolerance for a standard deviation of 0; -inf if all are missing


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return TRL's total reward, (N,), from rewards per function, (N, functions); NaN if no function scored."""
    total = (rewards * weights.to(rewards.device)).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), math.nan)
