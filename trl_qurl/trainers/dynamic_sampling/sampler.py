"""DAPO's dynamic sampling: a batch in which every group has something to teach (arXiv:2503.14476, Eq. 11).

TRL generates and scores one batch of prompts. This calls the same two methods in rounds and puts together a batch for
TRL to continue with. `G` completions per prompt make a group; groups are numbered over all processes, in the order in
which TRL lays out a batch, and may straddle two of them.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from trl_qurl.trainers.dynamic_sampling.prompts import Drawn, PromptStream, prompt_digest

logger = logging.getLogger(__name__)


class Sample(NamedTuple):
    """One completion, with all that TRL's two methods say about it."""

    row: dict[str, Any]  # of the data set
    prompt_ids: list[int]
    completion_ids: list[int]
    completion: Any  # text or conversation
    logps: list[float] | None  # of the sampled tokens, nats
    extras: dict[str, Any]  # what reward functions add to the table of completions


@dataclass(frozen=True)
class Batch:
    """The completions of one round, or a batch filled from several."""

    samples: list[Sample]  # this process's
    rewards: torch.Tensor  # of all processes, (B, functions)
    metrics: dict[str, float] = field(default_factory=dict)  # what filling it cost, over all processes

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The data set's rows behind the samples."""
        return [sample.row for sample in self.samples]

    def generated(self) -> tuple:
        """What TRL's `_generate` would have returned for these prompts, without tools and images."""
        prompt_ids = [sample.prompt_ids for sample in self.samples]
        completion_ids = [sample.completion_ids for sample in self.samples]
        completions = [sample.completion for sample in self.samples]
        logps = None if self.samples[0].logps is None else [sample.logps for sample in self.samples]
        return prompt_ids, completion_ids, None, completions, logps, {}, None, []


class RolloutFunctions(NamedTuple):
    """How a trainer generates and scores. They are handed over at each batch, so that a sampler holds no trainer."""

    generate: Callable[[list], tuple]  # the trainer's `_generate`, which returns what `Batch.generated` does
    score: Callable[..., torch.Tensor]  # its `_calculate_rewards`, which returns the rewards of all processes
    take_extras: Callable[[], dict[str, list]]  # what reward functions have added to the table; it is forgotten then


@dataclass
class DynamicSampler:
    """Fills batches with groups whose rewards differ."""

    group_size: int  # G
    max_rounds: int  # of generation for one batch, the first one included
    judge: Callable[[torch.Tensor], torch.Tensor]  # from rewards (N, functions) to the one that decides, (N,)
    prompts: PromptStream
    accelerator: Accelerator
    _warned: bool = False

    def fill(self, rows: list[dict[str, Any]], functions: RolloutFunctions) -> Batch:
        """Generate for a batch, and for other prompts in the place of those whose group has equal rewards.

        Every process must call it, with its own rows of the batch, one per completion.
        """
        rounds = [self._make_round(rows, functions)]
        batch = Batch(list(rounds[0].samples), rounds[0].rewards.clone())
        useful = self._useful(batch)  # (groups,)
        tried = {name for names in gather_object([[prompt_digest(row) for row in rows]]) for name in names}
        seen, good = len(useful), int(useful.sum())
        for _ in range(1, self.max_rounds):
            open_slots = (~useful).nonzero().flatten().tolist()
            fresh = self._draw(len(open_slots), good / seen, len(useful), tried) if open_slots else []
            if not fresh:
                break
            rounds.append(self._make_round(self._share_out(fresh), functions))
            found = self._useful(rounds[-1])
            seen, good = seen + len(found), good + int(found.sum())
            placed = dict(zip(found.nonzero().flatten().tolist(), open_slots, strict=False))
            self._place(rounds[-1], placed, batch)
            useful[list(placed.values())] = True
            if useful.all():
                # Prompts after the last one that was needed come again, so that what is trained on does not depend on
                # the size of a round, and so not on the number of processes.
                self.prompts.drawn = fresh[max(placed)].drawn
        self._warn_if_unfilled(useful, len(rounds))
        batch.metrics.update(self._metrics(rounds, batch.samples, useful))
        return batch

    def _useful(self, batch: Batch) -> torch.Tensor:
        return informative(self.judge(batch.rewards), self.group_size)

    def _make_round(self, rows: list[dict[str, Any]], functions: RolloutFunctions) -> Batch:
        prompts = [row["prompt"] for row in rows]
        prompt_ids, completion_ids, _, completions, logps, *_ = functions.generate(prompts)
        rewards = functions.score(rows, prompts, completions, completion_ids)
        # A column of another length belongs to no row.
        columns = {name: column for name, column in functions.take_extras().items() if len(column) == len(rows)}
        extras = [{name: column[i] for name, column in columns.items()} for i in range(len(rows))]
        logps = [None] * len(rows) if logps is None else logps
        return Batch(list(map(Sample, rows, prompt_ids, completion_ids, completions, logps, extras)), rewards)

    def _draw(self, missing: int, share: float, groups: int, tried: set[str]) -> list[Drawn]:
        """Prompts for the next round: as many as it takes if as many are useful as so far, but at most a batch."""
        wanted = min(groups, math.ceil(missing / max(share, 1 / 8)))  # a smaller share is an uncertain guess
        step = self.accelerator.num_processes // math.gcd(self.accelerator.num_processes, self.group_size)
        fresh = self.prompts.draw(-(-wanted // step) * step, tried)
        return fresh[: len(fresh) // step * step]  # every process must get as many completions to make

    def _share_out(self, fresh: Sequence[Drawn]) -> list[dict[str, Any]]:
        """This process's part of the groups of these prompts."""
        rows = [prompt.row for prompt in fresh for _ in range(self.group_size)]
        size = len(rows) // self.accelerator.num_processes
        return rows[self.accelerator.process_index * size :][:size]

    def _place(self, source: Batch, placed: dict[int, int], batch: Batch) -> None:
        """Put groups of a round into slots of the batch: into its rewards here, and samples wherever they belong."""
        moves = {
            group * self.group_size + i: slot * self.group_size + i
            for group, slot in placed.items()
            for i in range(self.group_size)
        }
        index = self.accelerator.process_index
        first_made, first_kept = index * len(source.samples), index * len(batch.samples)
        made_here = [(moves[i], sample) for i, sample in enumerate(source.samples, first_made) if i in moves]
        for target, sample in gather_object(made_here):
            if first_kept <= target < first_kept + len(batch.samples):
                batch.samples[target - first_kept] = sample
        for origin, target in moves.items():
            batch.rewards[target] = source.rewards[origin]

    def _warn_if_unfilled(self, useful: torch.Tensor, rounds: int) -> None:
        if not useful.all() and not self._warned:
            self._warned = True
            logger.warning(
                "Dynamic sampling found only %d of %d groups whose rewards differ in %d rounds of generation: the "
                "questions may be too easy or too hard for the policy. dynamic_sampling/filled_share shows later "
                "batches.",
                int(useful.sum()),
                len(useful),
                rounds,
            )

    def _metrics(self, rounds: list[Batch], kept: list[Sample], useful: torch.Tensor) -> dict[str, float]:
        decisive = self.judge(torch.cat([each.rewards for each in rounds]))  # (N,)
        made = [sample for each in rounds for sample in each.samples]
        discarded = sum(len(each.completion_ids) for each in made) - sum(len(each.completion_ids) for each in kept)
        local = torch.tensor([float(discarded)], device=self.accelerator.device)
        return {
            "dynamic_sampling/rounds": float(len(rounds)),
            "dynamic_sampling/discarded_share": 1 - len(kept) * self.accelerator.num_processes / len(decisive),
            "dynamic_sampling/extra_tokens": self.accelerator.reduce(local, reduction="sum").item(),
            "dynamic_sampling/filled_share": useful.float().mean().item(),
            "dynamic_sampling/unfiltered_reward": decisive.nanmean().item(),
        }


def informative(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Which groups have rewards that differ, bool (N / G,); a NaN, for lack of a score, counts neither way."""
    groups = rewards.view(-1, group_size)  # (groups, G)
    missing = groups.isnan()
    largest = groups.masked_fill(missing, -math.inf).amax(1)
    smallest = groups.masked_fill(missing, math.inf).amin(1)
    return largest - smallest > 1e-8  # TRL's tolerance for a standard deviation of zero; -inf for all missing


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """TRL's total reward, (N,), from those of the functions, (N, functions); NaN where none has scored."""
    total = (rewards * weights.to(rewards.device)).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), math.nan)
