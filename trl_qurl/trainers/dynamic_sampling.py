"""DAPO's dynamic sampling: fills a batch with groups of different rewards.

Source: arXiv:2503.14476, Eq. 11. It calls TRL's methods that generate and score a batch in rounds.
The `G` completions of a prompt form a group. Groups are numbered across all processes in the order
of TRL's batches, and may straddle two processes.
"""

import functools
import hashlib
import json
import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from trl_qurl.rollout.results import Generated
from trl_qurl.trainers.listed_tokens import Listing

logger = get_logger(__name__)  # logs in the main process only

CALL = re.compile(r"\(\) (missing|got an unexpected|takes) ")  # Python's words for wrong arguments
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

    def draw(self, count: int, tried: "TriedRows") -> list[DrawnPrompt]:
        """Draw `count` rows that were not tried, or fewer if none are left; add them to `tried`."""
        prompts: list[DrawnPrompt] = []
        for _ in range(2 * len(self.dataset)):  # the rest of this epoch plus one full epoch
            if len(prompts) == count:
                break
            epoch, position = divmod(self.drawn, len(self.dataset))
            index = int(epoch_order(len(self.dataset), self.seed, epoch)[position])
            self.drawn += 1
            if index in tried.indices:
                continue
            tried.indices.add(index)
            columns = self.dataset[index]
            row = {name: value for name, value in columns.items() if name in tried.columns}
            if not tried.is_in_batch(row):
                prompts.append(DrawnPrompt(row, self.drawn))
        return prompts


class TriedRows:
    """The rows of the dataset that a batch has used up.

    TRL passes rows without their index, so those that the batch began with are known by their
    columns. A row of the batch stands for one row of the dataset: of
    several that are equal in all columns, the others can still be drawn.

    Args:
        columns: Of the batch's rows, without those that `remove_unused_columns` removes.
        digests: Of the batch's rows, each once.
    """

    def __init__(self, columns: Collection[str], digests: Iterable[str]) -> None:
        self.columns = columns
        self.indices: set[int] = set()
        self._batch = Counter(digests)

    def is_in_batch(self, row: dict[str, Any]) -> bool:
        """Return whether a row is one that the batch began with, which then counts as found."""
        digest = row_digest(row)
        if self._batch[digest] == 0:
            return False
        self._batch[digest] -= 1
        return True


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
    listing: Listing | None  # if the engine lists more than what was sampled
    extras: dict[str, Any]  # columns that reward functions add to the table of completions


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
        digests = gather_object([row_digest(row) for row in rows])  # of all completions, in order
        tried = TriedRows(rows[0].keys(), digests[:: self.group_size])
        while len(rounds) < MAX_ROUNDS and not useful.all():
            open_slots = (~useful).nonzero().flatten().tolist()
            share = torch.cat([self._useful(each) for each in rounds]).double().mean().item()
            prompts = self._draw(len(open_slots), share, len(useful), tried)
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
        for name in {name for sample in batch.samples for name in sample.extras}:
            column = [sample.extras.get(name) for sample in batch.samples]
            trainer._pending_extra_logs[name] = column
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

    def _draw(self, missing: int, share: float, groups: int, tried: TriedRows) -> list[DrawnPrompt]:
        """Draw prompts for the next round, at most a batch.

        They are enough if the share of useful groups stays as it is.
        """
        least_share = 1 / 8  # a smaller one is not a reliable estimate
        count = min(groups, math.ceil(missing / max(share, least_share)))
        # Every process must generate the same number of completions.
        processes = self.accelerator.num_processes
        step = processes // math.gcd(processes, self.group_size)
        prompts = self.prompts.draw(math.ceil(count / step) * step, tried)
        return prompts[: len(prompts) // step * step]

    def _rows_of_this_process(self, prompts: list[DrawnPrompt]) -> list[dict[str, Any]]:
        """Return a round's rows for this process, one per completion."""
        rows = [prompt.row for prompt in prompts for _ in range(self.group_size)]
        size = len(rows) // self.accelerator.num_processes
        first = self.accelerator.process_index * size
        return rows[first : first + size]

    def _place(self, source: FilledBatch, slots: dict[int, int], batch: FilledBatch) -> None:
        """Copy groups of a round into slots of the batch.

        That is all rewards, and the samples that belong to this process.
        """
        targets: dict[int, int] = {}  # numbers of completions, over all processes
        for group, slot in slots.items():
            for i in range(self.group_size):
                targets[group * self.group_size + i] = slot * self.group_size + i
        for origin, target in targets.items():
            batch.rewards[target] = source.rewards[origin]
        process = self.accelerator.process_index
        outgoing = [
            (targets[number], sample)
            for number, sample in enumerate(source.samples, process * len(source.samples))
            if number in targets
        ]
        start = process * len(batch.samples)
        for target, sample in gather_object(outgoing):
            if start <= target < start + len(batch.samples):
                batch.samples[target - start] = sample


def sample_batch(rows: list[dict[str, Any]], trainer: Any) -> FilledBatch:
    """Return a completion for each row from `trainer`, with its rewards.

    Columns that reward functions add to the table of completions are kept with it.
    """
    prompts = [row["prompt"] for row in rows]
    generated = Generated(*trainer._generate(prompts))
    completion_ids = generated.completion_ids
    listings = trainer._listings() if trainer._listed_count else [None] * len(rows)
    rewards = trainer._calculate_rewards(rows, prompts, generated.completions, completion_ids)
    added = trainer._pending_extra_logs
    # A column of another length cannot be matched to rows.
    columns = {name: column for name, column in added.items() if len(column) == len(rows)}
    added.clear()
    samples = []
    for i, row in enumerate(rows):
        sample = Sample(
            row=row,
            prompt_ids=generated.prompt_ids[i],
            completion_ids=completion_ids[i],
            completion=generated.completions[i],
            logps=None if generated.logprobs is None else generated.logprobs[i],
            listing=listings[i],
            extras={name: column[i] for name, column in columns.items()},
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


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return TRL's total reward, (N,), from rewards per function, (N, functions).

    It is NaN where no function has scored.
    """
    totals = (rewards * weights.to(rewards.device)).nansum(1)
    return totals.masked_fill(rewards.isnan().all(1), math.nan)


@contextmanager
def named_rewards(names: list[str]) -> Iterator[None]:
    """Name the reward functions in TRL's error about what they return."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].name != "_calculate_rewards":
            raise
        if isinstance(error, TypeError) and CALL.search(str(error)):
            raise TypeError(
                f"TRL cannot call a reward function ({error}): it passes the columns of the "
                "dataset by name, and with remove_unused_columns=True none. Accept the ones there "
                "are, and **kwargs for the rest."
            ) from error
        text = f"Rewards ({', '.join(names)}) must be a number, or None, per completion: {error}."
        raise ValueError(text) from error
