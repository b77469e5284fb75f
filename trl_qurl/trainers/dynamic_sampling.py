"""DAPO's dynamic sampling: fills a batch with groups of different rewards (arXiv:2503.14476, Eq.
11).

It calls TRL's methods that generate and score a batch in rounds. The `G` completions of a prompt
form a group. Groups are numbered across all processes in the order of TRL's batches, and may
straddle two processes.
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

logger = get_logger(__name__)  # logs in the main process only

# what Python says of arguments that do not fit
CALL = re.compile(r"\(\) (missing|got an unexpected|takes) ")
MAX_ROUNDS = 10  # of generation for one batch, including the first: verl's limit for DAPO


@dataclass
class PromptStream:
    """The dataset's rows, reshuffled every epoch in an order that all processes share."""

    dataset: Any
    seed: int
    drawn: int = 0  # rows drawn so far; set it to continue after them

    def draw(self, count: int, tried: "TriedRows") -> list[tuple[dict[str, Any], int]]:
        """Draw `count` rows that were not tried, or fewer if none are left, and add them to
        `tried`.

        Returns rows of the dataset, each with the number of rows drawn so far, including it.
        """
        rows: list[tuple[dict[str, Any], int]] = []
        for _ in range(2 * len(self.dataset)):  # the rest of this epoch plus one full epoch
            if len(rows) == count:
                break
            epoch, position = divmod(self.drawn, len(self.dataset))
            index = int(epoch_order(len(self.dataset), self.seed, epoch)[position])
            self.drawn += 1
            if index in tried.indices:
                continue
            tried.indices.add(index)
            row = {
                name: value for name, value in self.dataset[index].items() if name in tried.columns
            }
            if not tried.is_in_batch(row):
                rows.append((row, self.drawn))
        return rows


class TriedRows:
    """The rows of the dataset that a batch has used up: by their index, and those it began with by
    all columns.

    TRL passes rows without their index. A row of the batch stands for one row of the dataset: of
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
        is_found = self._batch[digest] > 0
        self._batch[digest] -= is_found
        return is_found


@functools.lru_cache(maxsize=1)  # `draw` reads one order many times
def epoch_order(size: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the indices of an epoch's prompts in the order they are drawn, (size,)."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def row_digest(row: dict[str, Any]) -> str:
    """Return a short hash of all columns of a row."""
    return hashlib.blake2b(json.dumps(row, default=str).encode(), digest_size=8).hexdigest()


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
    # cost of filling the batch, over all processes
    metrics: dict[str, float] = field(default_factory=dict)

    def generated(self) -> tuple:
        """Return what TRL's `_generate` would have returned for these prompts, without tools and
        images.
        """
        _, prompt_ids, completion_ids, completions, logps, _ = map(
            list, zip(*self.samples, strict=True)
        )
        return (
            prompt_ids,
            completion_ids,
            None,
            completions,
            None if None in logps else logps,
            {},
            None,
            [],
        )


@dataclass
class DynamicSampler:
    """Sampler that fills batches with groups whose rewards differ."""

    group_size: int  # G
    # maps rewards, (N, functions), to the one that decides, (N,)
    judge: Callable[[torch.Tensor], torch.Tensor]
    prompts: PromptStream
    accelerator: Accelerator

    def fill(self, rows: list[dict[str, Any]], trainer: Any) -> Batch:
        """Fill a batch with completions from `trainer`, and replace groups of equal rewards by
        other prompts' groups.

        Every process must call this with its own rows of the batch, one per completion.
        """
        rounds = [sample_batch(rows, trainer)]
        batch = Batch(list(rounds[0].samples), rounds[0].rewards.clone())
        useful = self._useful(batch)  # (groups,)
        digests = gather_object([row_digest(row) for row in rows])  # of all completions, in order
        tried = TriedRows(rows[0].keys(), digests[:: self.group_size])
        while len(rounds) < MAX_ROUNDS and not useful.all():
            open_slots = (~useful).nonzero().flatten().tolist()
            share = torch.cat([self._useful(each) for each in rounds]).double().mean().item()
            prompts = self._draw(len(open_slots), share, len(useful), tried)
            if not prompts:
                break
            group_rows = [row for row, _ in prompts for _ in range(self.group_size)]
            size = len(group_rows) // self.accelerator.num_processes
            first = self.accelerator.process_index * size
            rounds.append(sample_batch(group_rows[first : first + size], trainer))
            new = self._useful(rounds[-1])
            slots = dict(zip(new.nonzero().flatten().tolist(), open_slots, strict=False))
            self._place(rounds[-1], slots, batch)
            useful[list(slots.values())] = True
            if useful.all():
                # Return unused prompts to the stream. Otherwise the training data would depend on
                # the size of a round, and with it on the number of processes.
                self.prompts.drawn = prompts[max(slots)][1]
        if not useful.all():
            logger.warning_once(
                "Dynamic sampling could not fill a batch with groups of different rewards in "
                f"{MAX_ROUNDS} rounds, or ran out of prompts: the questions may be too easy or too "
                "hard (dynamic_sampling/filled_share)."
            )
        for name in {name for each in batch.samples for name in each.extras}:
            trainer._pending_extra_logs[name] = [each.extras.get(name) for each in batch.samples]
        decisive = self.judge(torch.cat([each.rewards for each in rounds]))  # (N,)
        metrics = {
            "dynamic_sampling/rounds": float(len(rounds)),
            "dynamic_sampling/discarded_share": 1 - len(batch.rewards) / len(decisive),
            "dynamic_sampling/filled_share": useful.float().mean().item(),
            "dynamic_sampling/unfiltered_reward": decisive.nanmean().item(),
        }
        return Batch(batch.samples, batch.rewards, metrics)

    def _useful(self, batch: Batch) -> torch.Tensor:
        return informative(self.judge(batch.rewards), self.group_size)

    def _draw(
        self, missing: int, share: float, groups: int, tried: TriedRows
    ) -> list[tuple[dict[str, Any], int]]:
        """Draw prompts for the next round: enough if the share of useful groups stays as it is, at
        most a batch.
        """
        # a smaller share is not a reliable estimate
        count = min(groups, math.ceil(missing / max(share, 1 / 8)))
        step = self.accelerator.num_processes // math.gcd(
            self.accelerator.num_processes, self.group_size
        )
        prompts = self.prompts.draw(-(-count // step) * step, tried)
        # every process must generate the same number of completions
        return prompts[: len(prompts) // step * step]

    def _place(self, source: Batch, slots: dict[int, int], batch: Batch) -> None:
        """Copy groups of a round into slots of the batch: all rewards, and the samples that belong
        to this process.
        """
        size = self.group_size
        moves = {
            group * size + i: slot * size + i for group, slot in slots.items() for i in range(size)
        }
        index = self.accelerator.process_index
        source_start, batch_start = index * len(source.samples), index * len(batch.samples)
        outgoing = [
            (moves[i], sample)
            for i, sample in enumerate(source.samples, source_start)
            if i in moves
        ]
        for target, sample in gather_object(outgoing):
            if batch_start <= target < batch_start + len(batch.samples):
                batch.samples[target - batch_start] = sample
        for origin, target in moves.items():
            batch.rewards[target] = source.rewards[origin]


def sample_batch(rows: list[dict[str, Any]], trainer: Any) -> Batch:
    """Return a completion for each row from `trainer`, with its rewards and the columns that reward
    functions add.
    """
    prompts = [row["prompt"] for row in rows]
    prompt_ids, completion_ids, _, completions, logps, *_ = trainer._generate(prompts)
    rewards = trainer._calculate_rewards(rows, prompts, completions, completion_ids)
    extras = trainer._pending_extra_logs
    # A column of another length cannot be matched to rows.
    columns = {name: column for name, column in extras.items() if len(column) == len(rows)}
    of_rows = [{name: column[i] for name, column in columns.items()} for i in range(len(rows))]
    extras.clear()
    logps = [None] * len(rows) if logps is None else logps
    return Batch(
        list(map(Sample, rows, prompt_ids, completion_ids, completions, logps, of_rows)), rewards
    )


def informative(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return which groups have different rewards, bool (N / G,);
    NaN, a missing score, is ignored.
    """
    groups = rewards.view(-1, group_size)  # (groups, G)
    missing = groups.isnan()
    largest = groups.masked_fill(missing, -math.inf).amax(1)
    smallest = groups.masked_fill(missing, math.inf).amin(1)
    # TRL's tolerance for a standard deviation of 0; -inf if all are missing
    return largest - smallest > 1e-8


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return TRL's total reward, (N,), from rewards per function, (N, functions); NaN if no
    function scored.
    """
    return (
        (rewards * weights.to(rewards.device))
        .nansum(1)
        .masked_fill(rewards.isnan().all(1), math.nan)
    )


@contextmanager
def named_rewards(names: list[str]) -> Iterator[None]:
    """Name the reward functions in the error that TRL meets if it cannot make a tensor of what they
    return.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].name != "_calculate_rewards":
            raise
        if isinstance(error, TypeError) and CALL.search(str(error)):
            problem = (
                f"TRL cannot call a reward function ({error}): it passes the columns of the "
                "dataset by name"
            )
            way = "Accept the ones there are, and **kwargs for the rest"
            raise TypeError(
                f"{problem}, and with remove_unused_columns=True none. {way}."
            ) from error
        text = f"Rewards ({', '.join(names)}) must be a number, or None, per completion: {error}."
        raise ValueError(text) from error
