"""Rollouts in groups, scored by forward passes of the trainer: the mismatch, its guard, checkpoints
and `ahead`.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.utils import RepeatSampler

from trl_qurl.objective import OBJECTIVES, TRL_LOSS, Objective, surrogate_terms
from trl_qurl.rollout.ahead import AheadVLLMGeneration, UpcomingRows
from trl_qurl.rollout.backend import RolloutContext, Tokens
from trl_qurl.rollout.images import plain_prompts
from trl_qurl.rollout.mismatch import MismatchTally
from trl_qurl.rollout.prompts import check_room
from trl_qurl.trainers.arguments import check_arguments
from trl_qurl.trainers.dynamic_sampling import named_rewards
from trl_qurl.trainers.engine import QuantizedEngineMixin
from trl_qurl.trainers.guard import MismatchGuard
from trl_qurl.trainers.prompts import LongestPrompt, measure_prompts
from trl_qurl.trainers.reference import load_reference, save_reference, warn_of_another_reference
from trl_qurl.trainers.resuming import read_whole
from trl_qurl.trainers.saving import load_rollout_state, save_rollout_state, skip_epochs
from trl_qurl.trainers.scoring import ScoringPass, cap_of, learned_tokens, loss_metrics

CALIBRATION_PROMPTS, LONGEST_PROMPT = 8, 512  # for smoothing; in tokens

Batch = dict[str, Any]  # of TRL's trainers: tensors, (B, ...) each


class GroupRolloutsMixin(QuantizedEngineMixin):
    """[`QuantizedEngineMixin`] for trainers that score groups of completions with forward passes,
    as GRPO and RLOO.

    It measures the mismatch, judges it, generates ahead, and resumes inside a rollout. With a
    setting `objective`, it computes TRL's loss on the objective's inputs.
    """

    _smooths_by_loss = False
    # from rewards that differ within a group, else also from those between groups
    _learns_within_groups = True
    _train_sampler: RepeatSampler | None = None
    _buffered_inputs: Any  # TRL's batches of the current rollout
    _pass: ScoringPass | None = None  # inside `_watch_pass`
    _upcoming_rows: UpcomingRows | None = None
    _longest_prompt: LongestPrompt

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *positional: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self._check_room(self.vllm_generation.context)
        self._mismatch = MismatchTally(self.accelerator)
        self._guard = MismatchGuard(self.args)
        self.add_callback(self._guard)
        if self.ref_model is not None:
            warn_of_another_reference(self.model, self.ref_model, self.accelerator)

    def _before_engine(self, args: Any, arguments: dict[str, Any]) -> None:
        super()._before_engine(args, arguments)
        check_arguments(args, arguments)

    def _before_start(self) -> None:
        super()._before_start()
        self._longest_prompt = measure_prompts(self)
        if self.args.vllm_mode == "colocate" and self.args.vllm_max_model_length:
            self._check_room(self.args.vllm_max_model_length)

    def _check_room(self, context: int) -> None:
        """Raise `ValueError` if a prompt of the datasets fills a context of this many tokens."""
        longest = self._longest_prompt
        if longest.tokens == 0:  # no prompt is known yet
            return
        check_room(
            longest.tokens, context, self.max_completion_length or 1, f"The prompt {longest.name}"
        )

    @property
    def _rollout(self) -> RolloutContext:
        return self.vllm_generation.current

    @property
    def _objective(self) -> Objective | None:
        """The objective that corrects TRL's loss, if there is one."""
        return OBJECTIVES.get(vars(self.args).get("objective", TRL_LOSS))

    @property
    def _scores_in_update(self) -> bool:
        """Whether the loss's forward pass scores rollouts, instead of a pass in advance."""
        return False

    @property
    def _ahead(self) -> AheadVLLMGeneration | None:
        return self.vllm_generation if self.args.rollouts_ahead else None

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        looks_ahead = self._ahead is not None and self._mode == "train"
        self._rollout.upcoming = self._upcoming_prompts(inputs) if looks_ahead else None
        with (
            named_rewards(self.reward_func_names),
            self._watch_pass(not self._scores_in_update) as scored,
        ):
            batch = super()._generate_and_score_completions(inputs)
        self._record({"time/logps_s": scored.seconds})
        batch |= self._missing_logps(scored.logps)
        if "old_per_token_logps" in batch and "sampling_per_token_logps" in batch:
            self._tally(batch, batch["old_per_token_logps"])
            self._record_mismatch()
        if self._mode == "train":
            self._learning.observe(
                {name: values[-1] for name, values in self._metrics["train"].items() if values}
            )
        return batch

    def _has_signal(self, metrics: dict[str, float]) -> bool:
        """Return whether a rollout with these metrics has rewards to learn from."""
        if metrics.get("completions/clipped_ratio") == 1 and vars(self.args).get(
            "mask_truncated_completions"
        ):
            return False
        differs = (
            metrics["frac_reward_zero_std"] < 1
            if self._learns_within_groups
            else metrics["reward_std"] > 0
        )
        return differs and not math.isnan(metrics["reward"])

    def _missing_logps(self, proximal_logps: torch.Tensor | None) -> Batch:
        """Return log-probabilities that TRL's trainer leaves out of its batch; it may have scored
        in advance.
        """
        return {}

    def _upcoming_prompts(self, rows: list[dict[str, Any]]) -> Tokens:
        """Return the tokens of this process's prompts in the next rollout; none if these rows' is
        the last.
        """
        micro_batches = self.args.steps_per_generation * self.num_iterations  # per rollout
        if (
            self.state.global_step + micro_batches / self.args.gradient_accumulation_steps
            >= self.state.max_steps
        ):
            return []
        if self._upcoming_rows is None:
            sampler = super()._get_train_sampler(self.train_dataset)
            skip_epochs(sampler, self.state.epoch)
            self._upcoming_rows = UpcomingRows(sampler, self.train_dataset, self.accelerator)
        following = self._upcoming_rows.after(rows)
        return (
            super()._tokenize_prompts([row["prompt"] for row in following])[0] if following else []
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the parent does, and abort a rollout that is still out at the end."""
        self._forget_rollout()
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._ahead is not None:
                self._ahead.drop()

    def _forget_rollout(self) -> None:
        """Begin with a new rollout, because one that was interrupted is of other weights.

        A checkpoint brings its own.
        """
        self._step = 0
        self._buffered_inputs = None
        self._upcoming_rows = None
        self._mismatch = MismatchTally(self.accelerator)
        self._metrics["train"].clear()

    def _first_prompts(self) -> Tokens:
        if self._is_vlm or getattr(self, "environment_factories", None) is not None:
            return []
        prompts = [
            row["prompt"] for row in itertools.islice(self.train_dataset, CALIBRATION_PROMPTS)
        ]
        return [tokens[:LONGEST_PROMPT] for tokens in super()._tokenize_prompts(prompts)[0]]

    def _tokenize_prompts(self, prompts: list) -> tuple:
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        if images is not None and self.args.vllm_mode == "colocate":
            # TRL's RLOO trainer lacks `chat_template`, which is for tools.
            template = {
                "chat_template": vars(self).get("chat_template"),
                **self.chat_template_kwargs,
            }
            arguments = (
                self.processing_class,
                list(map(prepare_multimodal_messages, prompts)),
                prompt_ids,
            )
            self._rollout.plain_prompts = plain_prompts(*arguments, **template)
        return prompt_ids, images, fields

    @contextmanager
    def _watch_pass(
        self,
        is_scoring: bool,
        complete: Callable[[torch.Tensor], torch.Tensor] = lambda logps: logps,
    ) -> Iterator[ScoringPass]:
        """Watch the forward passes inside the block, and give TRL what `complete` makes of their
        log-probabilities.
        """
        self._pass = ScoringPass(complete, is_scoring)
        try:
            yield self._pass
        finally:
            self._pass = None

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple:
        started, watched = time.perf_counter(), self._pass
        is_scoring = (
            watched is not None and watched.is_scoring and watched.logps is None and model.training
        )
        in_advance = model.training and not torch.is_grad_enabled()
        with self._watch_activations(is_scoring):
            if in_advance:
                model.eval()  # the engine has no dropout either
            logps, *others = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            if in_advance:
                model.train()
        if watched is not None:
            watched.seconds += time.perf_counter() - started
            watched.logps = logps.detach() if watched.logps is None else watched.logps
            logps = watched.complete(logps)
        return logps, *others

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        """Compute TRL's loss on the objective's inputs, and record metrics of the update.

        The loss's own forward pass scores a rollout that was not scored in advance. TRL reads our
        inputs afterwards.
        """
        inputs = dict(inputs)
        proximal_logps = inputs.get("old_per_token_logps")
        if proximal_logps is not None:
            inputs |= self._objective_inputs(inputs, proximal_logps)

        def complete(logps: torch.Tensor) -> torch.Tensor:
            if proximal_logps is None:
                inputs.update(self._objective_inputs(inputs, logps.detach()))
            return self._weigh(logps, inputs)

        with self._watch_pass(proximal_logps is None, complete) as scored:
            loss = super()._compute_loss(model, inputs)
        if scored.logps is not None:  # else a subclass scores without our forward pass
            self._record_update(inputs, scored.logps, proximal_logps)
        return loss

    def _objective_inputs(
        self, batch: Batch, proximal_logps: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the inputs from which TRL's loss computes the objective, (B, T) each."""
        if self._objective is None:
            return {}
        # Masked tokens have no ratio: mark them with NaN, which also keeps their padding out of
        # exp().
        behavior_logps = batch["sampling_per_token_logps"].masked_fill(
            ~learned_tokens(batch), torch.nan
        )
        logps = proximal_logps, behavior_logps
        terms = surrogate_terms(
            self._objective.name, *logps, batch["advantages"], cap=cap_of(self.args)
        )
        return {"old_per_token_logps": terms.old_logps, "importance_sampling_ratio": terms.weight}

    def _weigh(self, logps: torch.Tensor, inputs: Batch) -> torch.Tensor:
        """Return what TRL's loss takes for the policy's log-probabilities, (B, T)."""
        return logps

    def _record_update(
        self, inputs: Batch, policy_logps: torch.Tensor, proximal_logps: torch.Tensor | None
    ) -> None:
        """Record metrics of an update, and of the rollout's mismatch if `proximal_logps` were not
        known before.
        """
        if proximal_logps is None and "sampling_per_token_logps" in inputs:
            proximal_logps = policy_logps
            self._tally(inputs, proximal_logps)
            # The rollout's last micro-batch (TRL increments `_step` after the loss); in evaluation,
            # each one is.
            if self._mode == "eval" or (self._step + 1) % self.args.steps_per_generation == 0:
                if self.vllm_importance_sampling_correction:
                    self._record(self._mismatch.sampling_metrics(cap_of(self.args)))
                self._record_mismatch()
        if proximal_logps is not None:
            lifts = self._objective is not None and self._objective.lifts_upper_bound
            lifting = (cap_of(self.args), 1 + self.epsilon_high) if lifts else None
            self._record(
                loss_metrics(
                    policy_logps, proximal_logps, inputs, self._sum_over_processes, lifting
                )
            )

    def _tally(self, batch: Batch, proximal_logps: torch.Tensor) -> None:
        logps = proximal_logps, batch["sampling_per_token_logps"]
        self._mismatch.add(*logps, learned_tokens(batch), cap_of(self.args))

    def _record_mismatch(self) -> None:
        """Log the mismatch of the rollout just scored, and pass it to the guard. Every process must
        call this.
        """
        metrics = self._mismatch.pop()
        self._record(metrics | self._guard.observe(metrics, self._mode == "train"))

    def _rollout_state(self) -> dict[str, Any]:
        """Return what a resumed run needs in addition to transformers' checkpoint; trainers may add
        to it.
        """
        smoothing = self.vllm_generation.weights.smoothing
        state = {
            "smoothing": smoothing and smoothing.state_dict(),
            "ahead": self._ahead and self._ahead.state(),
        }
        # TRL's count of micro-batches so far, and the batches of its rollout.
        return state | {"step": self._step, "batches": self._buffered_inputs}

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        self._step, self._buffered_inputs = state["step"], state["batches"]
        smoothing = self.vllm_generation.weights.smoothing
        if smoothing is not None and state["smoothing"]:
            smoothing.load_state_dict(state["smoothing"])
        if self._ahead is not None:
            self._ahead.load_state(state["ahead"])

    def _save_rollout(self, checkpoint: Path) -> None:
        super()._save_rollout(checkpoint)
        save_rollout_state(self._rollout_state(), checkpoint, self.accelerator, self.args)
        if vars(self.args).get("sync_ref_model"):
            save_reference(self.ref_model, self.accelerator, checkpoint)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            if vars(self.args).get("sync_ref_model"):
                load_reference(self.ref_model, self.accelerator, Path(checkpoint))
            # `self.state` is the checkpoint's by now
            skip_epochs(self._train_sampler, self.state.epoch)
            with read_whole(Path(checkpoint)):
                state = load_rollout_state(Path(checkpoint), self.accelerator, self.args)
            if state is not None:
                self._load_rollout_state(state)
