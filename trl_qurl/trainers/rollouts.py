"""Rollouts in groups, as of GRPO, PPO and RLOO: scored by the policy, learned from, and kept.

One step, and which method holds each part of it:

- Prompts: TRL's, and `_tokenize_prompts`.
- Sync: TRL calls `sync_weights` of the backend (`rollout/backend.py`) once a step.
- Generated: the backend's `generate`, which first sends what has changed since.
- Rewards: TRL's `_calculate_rewards`.
- Log-probabilities of the policy: `_get_per_token_logps_and_entropies`, in a pass in advance, or
  inside the loss (`_scores_in_update`).
- Judged: `_record_mismatch` (`checks/guard.py`), before the rollout is learned from; without a pass
  in advance, at its last micro-batch, before the optimizer's step.
- Learned from: `_compute_loss`.
- Kept for a resume: `_rollout_state`.
"""

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.utils import RepeatSampler

from trl_qurl.objective import OBJECTIVES, TRL_LOSS, Objective, surrogate_terms
from trl_qurl.rollout.mismatch import MismatchTally
from trl_qurl.rollout.repairs.image_prompts import plain_prompts
from trl_qurl.rollout.samples import Tokens
from trl_qurl.trainers import listed_tokens
from trl_qurl.trainers.callbacks import RolloutCallback
from trl_qurl.trainers.checks.prompts import DataCheck
from trl_qurl.trainers.checks.reference import ReferenceCheck
from trl_qurl.trainers.checks.rewards import explained_rewards
from trl_qurl.trainers.engine import QuantizedEngineMixin
from trl_qurl.trainers.reference import load_reference, save_reference
from trl_qurl.trainers.saving import load_rollout_state, save_rollout_state, skip_epochs
from trl_qurl.trainers.scoring import (
    Batch,
    LossPass,
    PolicyPass,
    Rollout,
    cap_of,
    learned_tokens,
    loss_metrics,
)

CALIBRATION_PROMPTS = 8  # for smoothing
LONGEST_PROMPT = 512  # tokens of these


class GroupRolloutsMixin(QuantizedEngineMixin):
    """[`QuantizedEngineMixin`] for trainers that compute log-probabilities of groups, as GRPO.

    It measures the mismatch of all completions, and resumes inside a rollout. With a setting
    `objective`, it computes TRL's loss on the objective's inputs.
    """

    _smooths_by_loss = False
    _scores_rollouts = True
    _learns_within_groups = True  # from rewards that differ within a group, not only between groups
    _train_sampler: RepeatSampler | None = None
    _buffered_inputs: Any  # TRL's batches of the current rollout
    _pass: PolicyPass | None = None  # inside `_watch_pass`

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *positional: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self._mismatch = MismatchTally(self.accelerator)

    def _checks(self, args: Any) -> list[RolloutCallback]:
        return [*super()._checks(args), DataCheck(), ReferenceCheck()]

    def _count_listed(self) -> int:
        scores = type(self)._get_per_token_logps_and_entropies
        is_ours = scores is GroupRolloutsMixin._get_per_token_logps_and_entropies
        return listed_tokens.listed_count(self, is_ours)

    @property
    def _objective(self) -> Objective | None:
        """The objective that corrects TRL's loss, if there is one."""
        return OBJECTIVES.get(vars(self.args).get("objective", TRL_LOSS))

    @property
    def _scores_in_update(self) -> bool:
        """Whether the loss's forward pass scores rollouts, instead of a pass in advance."""
        return False

    # Prompts

    def _first_prompts(self) -> Tokens:
        if self._is_vlm or getattr(self, "environment_factories", None) is not None:
            return []
        rows = itertools.islice(self.train_dataset, CALIBRATION_PROMPTS)
        prompts = super()._tokenize_prompts([row["prompt"] for row in rows])[0]
        return [tokens[:LONGEST_PROMPT] for tokens in prompts]

    def _tokenize_prompts(self, prompts: list) -> tuple:
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        if images is not None and self.args.vllm_mode == "colocate":
            self.vllm_generation.plain_prompts = plain_prompts(
                self.processing_class,
                [prepare_multimodal_messages(prompt) for prompt in prompts],
                prompt_ids,
                # TRL's RLOO trainer lacks `chat_template`, which is for tools.
                chat_template=vars(self).get("chat_template"),
                **self.chat_template_kwargs,
            )
        return prompt_ids, images, fields

    # Generated and scored

    def _begin_rollout(self, inputs: Any) -> Any:
        """Begin a rollout, and return the rows that TRL generates from."""
        has_lists = self._listed_count > 0
        self._rollout = Rollout(self.vllm_generation, has_lists, not self._scores_in_update)
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        rows = self._begin_rollout(inputs)
        rollout = self._rollout
        with self._watch_pass(rollout):
            batch = super()._generate_and_score_completions(rows)
        self._record({"time/logps_s": rollout.seconds})
        listed = rollout.lists(batch["completion_ids"].size(1))
        if listed is not None:
            batch |= listed._asdict()
            self._record(listed.metrics(learned_tokens(batch), self._sum_over_processes))
        batch |= self._missing_logps(rollout.logps)
        if "old_per_token_logps" in batch and "sampling_per_token_logps" in batch:
            self._tally(batch, batch["old_per_token_logps"])
            self._record_mismatch()
        return batch

    def _missing_logps(self, proximal_logps: torch.Tensor | None) -> Batch:
        """Return log-probabilities that TRL's trainer leaves out of its batch, as RLOO's does.

        It is given the policy's, (B, T), if there was a pass in advance.
        """
        return {}

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with explained_rewards(self.reward_func_names):
            self._rollout.rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rollout.rewards

    def _has_signal(self, metrics: dict[str, float]) -> bool:
        """Return whether a rollout with these metrics has rewards to learn from."""
        masks_all = vars(self.args).get("mask_truncated_completions")
        if masks_all and metrics.get("completions/clipped_ratio") == 1:
            return False
        if math.isnan(metrics["reward"]):
            return False
        if self._learns_within_groups:
            return metrics["frac_reward_zero_std"] < 1
        return metrics["reward_std"] > 0

    @contextmanager
    def _watch_pass(self, watched: PolicyPass) -> Iterator[None]:
        """Let `watched` see the forward passes inside the block."""
        outer, self._pass = self._pass, watched
        try:
            yield
        finally:
            self._pass = outer

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple:
        started = time.perf_counter()
        watched = self._pass or PolicyPass()
        teaches = watched.teaches_smoothing and watched.logps is None
        is_training = model.training
        in_advance = is_training and not torch.is_grad_enabled()
        if in_advance:
            model.eval()  # the engine has no dropout either
        try:
            with (
                self._watch_activations(teaches and is_training),
                listed_tokens.renormalized(self, model, watched.lists(logits_to_keep)),
            ):
                logps, *others = super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
                )
        finally:
            if in_advance:
                model.train()
        watched.seconds += time.perf_counter() - started
        return watched.take(logps), *others

    # Learned from

    def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as the parent does; over the listed tokens in any subclass, too."""
        with self._watch_pass(PolicyPass(listed_tokens.listed_inputs(inputs))):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        """Compute TRL's loss on the objective's inputs, and record metrics of the update."""
        inputs = dict(inputs)
        # TRL's name for them. Below, it holds the denominator of the clipped ratio.
        proximal_logps = inputs.get("old_per_token_logps")

        def complete(logps: torch.Tensor) -> torch.Tensor:
            # TRL reads the inputs after this forward pass, which may be the first to score them.
            if proximal_logps is None:
                inputs.update(self._objective_inputs(inputs, logps.detach()))
            return self._weigh(logps, inputs)

        if proximal_logps is not None:
            inputs.update(self._objective_inputs(inputs, proximal_logps))
        listed = listed_tokens.listed_inputs(inputs)
        in_loss = LossPass(complete, listed, teaches_smoothing=proximal_logps is None)
        with self._watch_pass(in_loss):
            loss = super()._compute_loss(model, inputs)
        if in_loss.logps is not None:  # else a subclass computes them without our forward pass
            self._record_update(inputs, in_loss.logps, proximal_logps)
        return loss

    def _objective_inputs(self, batch: Batch, proximal_logps: torch.Tensor) -> Batch:
        """Return the inputs from which TRL's loss computes the objective, (B, T) each."""
        if self._objective is None:
            return {}
        # Masked tokens have no ratio: NaN also keeps their padding out of exp().
        is_masked = ~learned_tokens(batch)
        behavior_logps = batch["sampling_per_token_logps"].masked_fill(is_masked, torch.nan)
        terms = surrogate_terms(
            self._objective.name,
            proximal_logps,
            behavior_logps,
            batch["advantages"],
            cap=cap_of(self.args),
        )
        return {"old_per_token_logps": terms.old_logps, "importance_sampling_ratio": terms.weight}

    def _weigh(self, logps: torch.Tensor, inputs: Batch) -> torch.Tensor:
        """Return what TRL's loss takes for the policy's log-probabilities, (B, T); RLOO weighs."""
        return logps

    def _record_update(
        self, inputs: Batch, policy_logps: torch.Tensor, proximal_logps: torch.Tensor | None
    ) -> None:
        """Record metrics of an update, and the mismatch of a rollout that it has scored."""
        if proximal_logps is None:
            if "sampling_per_token_logps" not in inputs:
                return
            proximal_logps = policy_logps
            self._tally(inputs, proximal_logps)
            # TRL increments `_step` after the loss. In evaluation, each micro-batch is a rollout.
            is_last = (self._step + 1) % self.args.steps_per_generation == 0
            if self._mode == "eval" or is_last:
                self._record_mismatch()
        lifting = None
        if self._objective is not None and self._objective.lifts_upper_bound:
            lifting = (cap_of(self.args), 1 + self.epsilon_high)
        sum_up = self._sum_over_processes
        self._record(loss_metrics(policy_logps, proximal_logps, inputs, sum_up, lifting))

    def _record_mismatch(self) -> None:
        """Log the mismatch of the rollout just scored, and judge it. A collective operation."""
        metrics = self._mismatch.pop()
        self._record(metrics)
        self._tell("on_scored", metrics)

    def _tally(self, batch: Batch, proximal_logps: torch.Tensor) -> None:
        behavior_logps = batch["sampling_per_token_logps"]
        mask = learned_tokens(batch)
        self._mismatch.add(proximal_logps, behavior_logps, mask, cap_of(self.args))

    # Kept for a resume

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the parent does, beginning with a new rollout."""
        self._forget_rollout()
        return super().train(*args, **kwargs)

    def _forget_rollout(self) -> None:
        """Begin with a new rollout, because one that was interrupted is of other weights.

        A checkpoint brings its own.
        """
        self._step = 0
        self._buffered_inputs = None
        self._mismatch = MismatchTally(self.accelerator)
        self._metrics["train"].clear()

    def _rollout_state(self) -> dict[str, Any]:
        """Return what a resumed run needs in addition to transformers' checkpoint."""
        smoothing = self.vllm_generation.weights.smoothing
        return {
            "smoothing": None if smoothing is None else smoothing.state_dict(),
            "step": self._step,  # TRL's count of micro-batches so far
            "batches": self._buffered_inputs,
        }

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._buffered_inputs = state["batches"]
        smoothing = self.vllm_generation.weights.smoothing
        if smoothing is not None and state["smoothing"]:
            smoothing.load_state_dict(state["smoothing"])

    def _save_rest(self, checkpoint: Path) -> None:
        super()._save_rest(checkpoint)
        save_rollout_state(self._rollout_state(), checkpoint, self.accelerator, self.args)
        if vars(self.args).get("sync_ref_model"):
            save_reference(self.ref_model, self.accelerator, checkpoint)

    def _load_rest(self, checkpoint: Path) -> None:
        super()._load_rest(checkpoint)
        if vars(self.args).get("sync_ref_model"):
            load_reference(self.ref_model, self.accelerator, checkpoint)
        skip_epochs(self._train_sampler, self.state.epoch)  # `state` is the checkpoint's by now
        state = load_rollout_state(checkpoint, self.accelerator, self.args)
        if state is not None:
            self._load_rollout_state(state)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler
