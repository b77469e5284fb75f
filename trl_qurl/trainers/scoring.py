"""Passes of the policy, the rollout that they score, and metrics of an update."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trl_qurl.objective import importance_ratio
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.cost import RolloutCost
from trl_qurl.rollout.samples import Samples
from trl_qurl.trainers.dynamic_sampling import FilledBatch
from trl_qurl.trainers.listed_tokens import ListedTokens, list_tokens

Batch = dict[str, Any]  # of TRL's trainers: tensors, (B, ...) each


class PolicyPass:
    """A trainer's forward passes inside a block, of which the first is kept.

    Args:
        listed: Of the completions, what the engine lists, if the passes follow it.
        teaches_smoothing: Whether smoothing learns from the first.
    """

    def __init__(self, listed: ListedTokens | None = None, teaches_smoothing: bool = False) -> None:
        self.listed = listed
        self.teaches_smoothing = teaches_smoothing
        self.logps: torch.Tensor | None = None  # of the first, (B, T), without gradient
        self.seconds = 0.0

    def lists(self, length: int) -> ListedTokens | None:
        """Return what the engine lists for completions that are padded to this length."""
        return self.listed

    def take(self, logps: torch.Tensor) -> torch.Tensor:
        """Keep the first log-probabilities, (B, T), and return what TRL reads in their place."""
        if self.logps is None:
            self.logps = logps.detach()
        return logps


class LossPass(PolicyPass):
    """The forward pass inside TRL's loss.

    Args:
        complete: Returns what TRL's loss reads in place of log-probabilities, (B, T).
        listed: As for the parent.
        teaches_smoothing: As for the parent.
    """

    def __init__(
        self,
        complete: Callable[[torch.Tensor], torch.Tensor],
        listed: ListedTokens | None,
        teaches_smoothing: bool,
    ) -> None:
        super().__init__(listed, teaches_smoothing)
        self._complete = complete

    def take(self, logps: torch.Tensor) -> torch.Tensor:
        """Keep the first log-probabilities, (B, T), and return what TRL reads in their place."""
        return self._complete(super().take(logps))


class Rollout(PolicyPass):
    """One rollout as this process sees it: made when it begins, and filled in later.

    `logps` are the policy's, if a pass in advance scores it (otherwise the reference model's may be
    there, and nobody reads them).

    Args:
        generation: The trainer's backend.
        has_lists: Whether the passes follow what the engine lists.
        teaches_smoothing: As for the parent.
    """

    def __init__(
        self,
        generation: QuantizedVLLMGeneration,
        has_lists: bool = False,
        teaches_smoothing: bool = False,
    ) -> None:
        super().__init__(None, teaches_smoothing)
        self._generation = generation
        self._has_lists = has_lists
        self.filled: FilledBatch | None = None  # by dynamic sampling
        self.rewards: Any = None  # of all processes, (B · processes, functions)
        self.metrics: dict[str, float] = {}  # recorded since it began, by name
        self.cost = RolloutCost()
        self.version = ""  # of the weights that the engine sampled with

    @functools.cached_property
    def samples(self) -> Samples:
        """This process's samples, read once after generation: with dynamic sampling, the batch.

        With tools or a `rollout_func`, they are those of the last turn.
        """
        return self._generation.samples if self.filled is None else self.filled.as_samples()

    def end(self, metrics: dict[str, float], cost: RolloutCost) -> None:
        """Keep what is known once all completions have rewards."""
        self.version = self._generation.sync.version
        self.samples  # noqa: B018  # later, the backend has others
        self.metrics = metrics
        self.cost = cost

    def lists(self, length: int) -> ListedTokens | None:
        """Return what the engine lists for completions that are padded to this length."""
        if self._has_lists and self.listed is None:
            device = self._generation.accelerator.device
            self.listed = list_tokens(self.samples.listings, length, device)
        return self.listed


def learned_tokens(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mask the completion tokens to learn from, bool (B, T): no padding, and no tool output."""
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def cap_of(args: Any) -> float:
    """Return the cap C of a config, a ratio; infinite for `None`."""
    return math.inf if args.importance_cap is None else args.importance_cap


def loss_metrics(
    policy_logps: torch.Tensor,
    proximal_logps: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    sum_over_processes: Callable[[torch.Tensor], torch.Tensor],
    lifting: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Return metrics of an update on B sequences of T completion tokens.

    `policy/approx_kl` estimates KL(π_prox ‖ π_θ) in nats per token by k3, R − 1 − log R with
    R = π_θ/π_prox (Schulman 2020, "Approximating KL Divergence"). `acr/*` are shares of all tokens
    learned from: those whose upper bound ACR lifted, and the subset of these that TIS would have
    clipped.

    Args:
        policy_logps: Of the policy, (B, T).
        proximal_logps: Of the policy at rollout time, (B, T).
        inputs: Of the loss.
        sum_over_processes: Adds up a tensor over all processes.
        lifting: With ACR, the cap C, and the bound 1 + ε_high that it lifts.
    """
    learned = learned_tokens(inputs)
    log_ratio = (policy_logps - proximal_logps).masked_fill(~learned, 0.0).double()  # (B, T)
    parts = {"policy/approx_kl": log_ratio.expm1() - log_ratio}  # (B, T) each
    if lifting is not None:
        cap, bound = lifting
        advantages = inputs["advantages"].reshape(len(learned), -1)  # (B, T) or (B, 1)
        rho = importance_ratio(proximal_logps, inputs["sampling_per_token_logps"])  # (B, T)
        lifted = learned & (rho > cap)
        is_clipped = torch.exp(policy_logps - inputs["old_per_token_logps"]) > bound
        let_through = lifted & (advantages > 0) & (log_ratio.exp() > bound) & ~is_clipped
        parts |= {"acr/lifted_share": lifted, "acr/let_through_share": let_through}
    sums = torch.stack([part.sum().float() for part in (learned, *parts.values())])
    count, *totals = sum_over_processes(sums).tolist()
    return {name: total / max(count, 1.0) for name, total in zip(parts, totals, strict=True)}
