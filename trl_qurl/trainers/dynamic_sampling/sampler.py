"""DAPO's dynamic sampling: a batch in which every group has something to teach (arXiv:2503.14476, Eq. 11).

TRL generates and scores one batch of prompts. This does the same in rounds, by calling the very same two methods, and
puts together a batch that TRL then goes on with as if it had come from one. `G` completions per prompt make a group;
groups are numbered over all processes, in the order in which TRL lays out a batch, and may straddle two of them.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trl_qurl.trainers.dynamic_sampling.prompts import Drawn, PromptStream, prompt_digest

logger = logging.getLogger(__name__)

FEW = 1 / 8
"""Share of useful groups below which a round is not made larger still: one in eight is a guess in itself."""


class Sample(NamedTuple):
    """One completion, with all that TRL's two methods say about it."""

    row: dict[str, Any]  # of the data set
    prompt_ids: list[int]
    completion_ids: list[int]
    completion: Any  # text or conversation
    logps: list[float] | None  # of the sampled tokens, nats
    extras: dict[str, Any]  # what reward functions add to the table of completions


@dataclass(frozen=True)
class Round:
    """What one round gave: this process's samples, and the rewards of all processes, (N, functions)."""

    samples: list[Sample]
    rewards: torch.Tensor


@dataclass(frozen=True)
class FilledBatch:
    """A batch to go on with.

    Attributes:
        samples: This process's.
        rewards: Of all processes, (B, functions).
        metrics: What the selection cost, by name.
    """

    samples: list[Sample]
    rewards: torch.Tensor
    metrics: dict[str, float]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The data set's rows behind the samples."""
        return [sample.row for sample in self.samples]

    def generated(self) -> tuple:
        """What TRL's `_generate` would have returned for these prompts, without tools and images."""
        samples = self.samples
        logps = None if samples[0].logps is None else [sample.logps for sample in samples]
        return (
            [sample.prompt_ids for sample in samples],
            [sample.completion_ids for sample in samples],
            None,
            [sample.completion for sample in samples],
            logps,
            {},
            None,
            [],
        )


class RolloutFunctions(NamedTuple):
    """
    How a trainer generates and scores. They are handed over at each batch, so that a sampler holds no trainer.

    Attributes:
        generate: The trainer's `_generate`: from prompts to what `FilledBatch.generated` returns.
        score: The trainer's `_calculate_rewards`, which returns the rewards of all processes.
        take_extras: Hands over what reward functions have added to the table of completions, and forgets it.
    """

    generate: Callable[[list], tuple]
    score: Callable[..., torch.Tensor]
    take_extras: Callable[[], dict[str, list]]


class DynamicSampler:
    """
    Fills batches with groups whose rewards differ.

    Args:
        group_size: G, completions per prompt.
        max_rounds: Rounds of generation for one batch, the first one included.
        judge: From rewards (N, functions) to the one that decides, (N,); NaN where there is none.
        prompts: For replacement.
        accelerator: The trainer's.
    """

    def __init__(
        self,
        group_size: int,
        max_rounds: int,
        judge: Callable[[torch.Tensor], torch.Tensor],
        prompts: PromptStream,
        accelerator: Accelerator,
    ) -> None:
        self.prompts = prompts
        self._group_size = group_size
        self._max_rounds = max_rounds
        self._judge = judge
        self._accelerator = accelerator
        self._warned = False

    def fill(self, rows: list[dict[str, Any]], functions: RolloutFunctions) -> FilledBatch:
        """
        Generate for a batch, and for other prompts in the place of those whose group has equal rewards.

        Every process must call it, with its own rows of the batch.

        Args:
            rows: Of the data set, one per completion.
            functions: How to generate and score.
        """
        first = _make_round(rows, functions)
        samples, rewards = list(first.samples), first.rewards.clone()
        useful = informative(self._judge(rewards), self._group_size)  # (groups,)
        tried = {name for names in gather_object([[prompt_digest(row) for row in rows]]) for name in names}
        count = _Count(self._accelerator, first, self._judge)
        seen, good = len(useful), int(useful.sum())
        for _ in range(1, self._max_rounds):
            open_slots = (~useful).nonzero().flatten().tolist()
            fresh = self._draw(len(open_slots), good / seen, len(useful), tried) if open_slots else []
            if not fresh:
                break
            further = _make_round(self._share_out(fresh), functions)
            count.add(further)
            found = informative(self._judge(further.rewards), self._group_size)
            seen, good = seen + len(found), good + int(found.sum())
            placed = dict(zip(found.nonzero().flatten().tolist(), open_slots, strict=False))
            self._place(further, placed, samples, rewards)
            useful[list(placed.values())] = True
            if useful.all():
                # Prompts after the last one that was needed come again, so that what is trained on does not depend on
                # the size of a round, and so not on the number of processes.
                self.prompts.drawn = fresh[max(placed)].drawn
        self._warn_if_unfilled(useful, count.rounds)
        return FilledBatch(samples, rewards, count.metrics(samples, useful))

    def _draw(self, missing: int, share: float, groups: int, tried: set[str]) -> list[Drawn]:
        """Prompts for the next round: as many as it takes if as many are useful as so far, but at most a batch."""
        wanted = min(groups, math.ceil(missing / max(share, FEW)))
        step = self._accelerator.num_processes // math.gcd(self._accelerator.num_processes, self._group_size)
        fresh = self.prompts.draw(-(-wanted // step) * step, tried)
        return fresh[: len(fresh) // step * step]  # every process must get as many completions to make

    def _share_out(self, fresh: Sequence[Drawn]) -> list[dict[str, Any]]:
        """This process's part of the groups of these prompts."""
        rows = [prompt.row for prompt in fresh for _ in range(self._group_size)]
        size = len(rows) // self._accelerator.num_processes
        return rows[self._accelerator.process_index * size :][:size]

    def _place(self, source: Round, placed: dict[int, int], samples: list[Sample], rewards: torch.Tensor) -> None:
        """Put groups of a round into slots of the batch: into its rewards here, and samples wherever they belong."""
        moves = {
            group * self._group_size + i: slot * self._group_size + i
            for group, slot in placed.items()
            for i in range(self._group_size)
        }
        index = self._accelerator.process_index
        first_made, first_kept = index * len(source.samples), index * len(samples)
        made_here = [
            (moves[first_made + i], sample) for i, sample in enumerate(source.samples) if first_made + i in moves
        ]
        for target, sample in gather_object(made_here):
            if first_kept <= target < first_kept + len(samples):
                samples[target - first_kept] = sample
        for origin, target in moves.items():
            rewards[target] = source.rewards[origin]

    def _warn_if_unfilled(self, useful: torch.Tensor, rounds: int) -> None:
        if bool(useful.all()) or self._warned:
            return
        self._warned = True
        logger.warning(
            "Dynamic sampling found only %d of %d groups whose rewards differ in %d rounds of generation: the batch "
            "is used as it is, and the other groups teach nothing. The questions may be too easy or too hard for the "
            "policy, or the reward cannot tell its answers apart; dynamic_sampling/filled_share shows how it goes on.",
            int(useful.sum()),
            len(useful),
            rounds,
        )


def _make_round(rows: list[dict[str, Any]], functions: RolloutFunctions) -> Round:
    prompts = [row["prompt"] for row in rows]
    prompt_ids, completion_ids, _, completions, logps, *_ = functions.generate(prompts)
    rewards = functions.score(rows, prompts, completions, completion_ids)  # (N, functions), of all processes
    extras = _by_row(functions.take_extras(), len(rows))
    kept_logps = [None] * len(rows) if logps is None else logps
    samples = map(Sample, rows, prompt_ids, completion_ids, completions, kept_logps, extras)
    return Round(list(samples), rewards)


class _Count:
    """What the rounds of one batch cost, over all processes."""

    def __init__(self, accelerator: Accelerator, first: Round, judge: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._accelerator = accelerator
        self._judge = judge
        self.rounds = 0
        self._tokens = 0
        self._judged: list[torch.Tensor] = []
        self.add(first)

    def add(self, made: Round) -> None:
        self.rounds += 1
        self._tokens += _tokens(made.samples)
        self._judged.append(self._judge(made.rewards))

    def metrics(self, kept: list[Sample], useful: torch.Tensor) -> dict[str, float]:
        local = torch.tensor([float(self._tokens - _tokens(kept))], device=self._accelerator.device)
        judged = torch.cat(self._judged)
        kept_count = len(kept) * self._accelerator.num_processes
        return {
            "dynamic_sampling/rounds": float(self.rounds),
            "dynamic_sampling/discarded_share": 1 - kept_count / len(judged),
            "dynamic_sampling/extra_tokens": self._accelerator.reduce(local, reduction="sum").item(),
            "dynamic_sampling/filled_share": useful.float().mean().item(),
            "dynamic_sampling/unfiltered_reward": judged.nanmean().item(),
        }


def informative(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """
    Which groups have rewards that differ.

    Args:
        rewards: (N,), NaN where a completion could not be scored: it counts neither way.
        group_size: G.

    Returns:
        Bool, (N / G,).
    """
    groups = rewards.view(-1, group_size)  # (groups, G)
    missing = groups.isnan()
    largest = groups.masked_fill(missing, -math.inf).amax(1)
    smallest = groups.masked_fill(missing, math.inf).amin(1)
    return largest - smallest > 1e-8  # TRL's tolerance for a standard deviation of zero; -inf for all missing


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """TRL's total reward, (N,), from those of the functions, (N, functions); NaN where none has scored."""
    total = (rewards * weights.to(rewards.device)).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), math.nan)


def _by_row(columns: dict[str, list], count: int) -> Iterator[dict[str, Any]]:
    """Values by row from values by column; a column of another length belongs to no row and is left out."""
    whole = {name: values for name, values in columns.items() if len(values) == count}
    return ({name: values[i] for name, values in whole.items()} for i in range(count))


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.completion_ids) for sample in samples)
