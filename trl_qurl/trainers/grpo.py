"""`QuRLGRPOTrainer`: TRL's `GRPOTrainer` on quantized rollouts.

Every override calls `super()` and adds something before or after it: the constructor (engine, UAQ), scoring (mismatch
metrics), the forward pass (its seconds, and its result for the objective), the loss (the paper's objectives, as inputs
and clip bounds of the parent's own loss) and checkpoints (the rollout in progress).

With one update per rollout the log-probabilities "at rollout time" are those of the update itself, so the pass that
would compute them beforehand is left out, as the parent does it without vLLM.
"""

import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.import_utils import is_vllm_available
from trl.trainer import grpo_trainer

from trl_qurl.config import QuRLGRPOConfig
from trl_qurl.objective import surrogate_terms
from trl_qurl.quantization.schemes import get_scheme
from trl_qurl.rollout.backend import quantized_generation
from trl_qurl.rollout.mismatch import MismatchTally
from trl_qurl.rollout.settings import RolloutSettings
from trl_qurl.trainers.callbacks import RunLogCallback, TrainerAwareCallback, UpdateAwareQuantizationCallback
from trl_qurl.trainers.dynamic_trainer import DynamicSamplingTrainer
from trl_qurl.trainers.loss_metrics import loss_metrics, loss_sums
from trl_qurl.trainers.prompt_stream import check_prompts
from trl_qurl.trainers.rollout_state import (
    RolloutState,
    epochs_done,
    load_rollout_state,
    save_rollout_state,
    skip_epochs,
)
from trl_qurl.trainers.saving import SavingTrainer
from trl_qurl.trainers.step_timer import StepTimer


class QuRLGRPOTrainer(SavingTrainer, DynamicSamplingTrainer):
    """
    [`~trl.GRPOTrainer`] whose rollouts come from an 8-bit copy of the policy, re-quantized before every generation.

    Training stays in full precision; the objective (`args.objective`) corrects for the difference. Takes the arguments
    of [`~trl.GRPOTrainer`], with `args` a [`QuRLGRPOConfig`]. Method and defaults are those of QuRL (arXiv
    2602.13953).

    Raises:
        TypeError: If `args` is not a `QuRLGRPOConfig`.
        ImportError: If vLLM is missing.

    Example:

    ```python
    from datasets import load_dataset
    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

    trainer = QuRLGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=lambda completions, **kwargs: [float(len(set(completion))) for completion in completions],
        args=QuRLGRPOConfig("output", steps_per_generation=16, gradient_accumulation_steps=4),
        train_dataset=load_dataset("trl-lib/tldr", split="train"),
    )
    trainer.train()
    ```
    """

    epsilon_low: Any
    epsilon_high: Any
    vllm_importance_sampling_correction: bool

    _config_class = QuRLGRPOConfig
    _algorithm = "GRPO"
    _tag_names = ["trl", "grpo", "qurl"]
    _name = "QuRL"
    _paper = {
        "title": "QuRL: Efficient Reinforcement Learning with Quantized Rollout",
        "id": "2602.13953",
        "citation": (
            "@inproceedings{qurl2026,\n"
            "    title        = {{QuRL: Efficient Reinforcement Learning with Quantized Rollout}},\n"
            "    year         = 2026,\n"
            "    booktitle    = {ICLR},\n"
            "    eprint       = {arXiv:2602.13953},\n"
            "}"
        ),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        arguments = named_arguments(*args, **kwargs)
        config = arguments["args"] = self._checked_config(arguments.get("args"), arguments["model"])
        check_prompts(arguments.get("train_dataset"), config.generation_batch_size // config.num_generations)
        callbacks: list[Any] = []
        if config.effective_uaq_scale != 1.0:
            callbacks += _uaq_callbacks(arguments["model"], arguments.get("peft_config"), config.effective_uaq_scale)
        self._step_timer = StepTimer(record=lambda seconds: self._record("train", {"time/update_s": seconds}))
        run_log = RunLogCallback(
            {
                "updates_per_rollout": config.updates_per_rollout,
                "algorithm": self._algorithm,
                "uaq_scale": config.effective_uaq_scale,
            }
        )
        # Before the user's, whose rows belong into the log, and whose time is no step's.
        arguments["callbacks"] = [*callbacks, self._step_timer, run_log, *(arguments.get("callbacks") or [])]
        self._scoring_seconds = 0.0
        self._train_sampler: Any = None
        self._on_policy_logps: Callable[[torch.Tensor], None] | None = None
        with quantized_generation(grpo_trainer, _rollout_settings(config)):
            super().__init__(**arguments)
        self._mismatch = MismatchTally(self.accelerator)
        self.vllm_generation.global_step = lambda: self.state.global_step
        for callback in self.callback_handler.callbacks:
            self._introduce_to(callback)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, and tell it its trainer if it needs to know.

        Args:
            callback: As for any trainer of transformers.
        """
        super().add_callback(callback)
        self._introduce_to(self.callback_handler.callbacks[-1])

    def _introduce_to(self, callback: Any) -> None:
        if isinstance(callback, TrainerAwareCallback):
            callback.trainer = self

    @classmethod
    def _checked_config(cls, config: Any, model: Any) -> Any:
        """The config of this trainer, made up if none is given."""
        _require_vllm(config)
        kind = cls._config_class
        if config is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            return kind(f"{name.split('/')[-1] or 'model'}-QuRL-{cls._algorithm}")
        if not isinstance(config, kind):
            raise TypeError(
                f"args is a {type(config).__name__}, which lacks settings of {cls.__name__}: pass a "
                f"trl_qurl.{kind.__name__} (it takes the same fields and adds its own)."
            )
        return config

    # Rollout ---------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        started = time.perf_counter()
        self._scoring_seconds = 0.0
        with self._scoring():
            batch = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        if "old_per_token_logps" in batch:
            self._add_mismatch(batch["old_per_token_logps"], batch)
            self._record(mode, self._mismatch.pop())
        self._record(mode, self._rollout_cost())
        self._record(mode, self.vllm_generation.pop_weight_metrics())
        self._step_timer.exclude(time.perf_counter() - started)
        return batch

    @property
    def _scores_in_update(self) -> bool:
        """Whether every token of a rollout meets the policy that was in force when it was made."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """Keep the parent from scoring a rollout beforehand where the update does it."""
        corrects = self.vllm_importance_sampling_correction
        # What the parent needs them for is this ratio, which the loss then forms.
        self.vllm_importance_sampling_correction = corrects and not self._scores_in_update
        try:
            yield
        finally:
            self.vllm_importance_sampling_correction = corrects

    def _add_mismatch(self, proximal_logps: torch.Tensor, inputs: dict[str, Any]) -> None:
        self._mismatch.add(proximal_logps, inputs["sampling_per_token_logps"], learned_tokens(inputs), self._cap)

    def _rollout_cost(self) -> dict[str, float]:
        cost = self.vllm_generation.pop_cost()
        local = torch.tensor([float(cost.tokens)], device=self.accelerator.device)
        tokens = self.accelerator.reduce(local, reduction="sum").item()
        return {
            "time/quantize_s": cost.quantize_s,
            "time/sync_s": cost.sync_s,
            "time/sync_check_s": cost.check_s,
            "sync/sent_mb": cost.sent_bytes / 1e6,
            "time/generate_s": cost.generate_s,
            "time/logps_s": self._scoring_seconds,
            "throughput/generated_tokens_per_s": tokens / cost.generate_s if cost.generate_s else 0.0,
        }

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        started = time.perf_counter()
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._scoring_seconds += time.perf_counter() - started
        if self._on_policy_logps is not None:
            self._on_policy_logps(result[0].detach())
        return result

    # Objective -------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        mode = "train" if self.model.training else "eval"
        loss_inputs = dict(inputs)
        clip_bounds = self.epsilon_low, self.epsilon_high
        # The parent's first deed is the forward pass; what it reads after that is completed as soon as that is done.
        self._on_policy_logps = functools.partial(self._apply_objective, loss_inputs, mode)
        try:
            loss = super()._compute_loss(model, loss_inputs)
        finally:
            self._on_policy_logps = None
            self.epsilon_low, self.epsilon_high = clip_bounds
        if "old_per_token_logps" not in inputs and self._ends_rollout(mode):
            self._record(mode, self._mismatch.pop())
        return loss

    def _apply_objective(self, loss_inputs: dict[str, Any], mode: str, policy_logps: torch.Tensor) -> None:
        """Give the parent's loss the objective's inputs and clip bounds, given log-probabilities (B, T)."""
        learned = learned_tokens(loss_inputs)
        proximal_logps = loss_inputs.get("old_per_token_logps")
        if proximal_logps is None:
            proximal_logps = policy_logps
            self._add_mismatch(proximal_logps, loss_inputs)
        epsilon_low, epsilon_high = float(self.epsilon_low), float(self.epsilon_high)
        terms = surrogate_terms(
            self.args.objective,
            proximal_logps,
            # A token that is not learned from has no ratio; NaN says so, and keeps its padding out of exp().
            loss_inputs["sampling_per_token_logps"].masked_fill(~learned, torch.nan),
            cap=self._cap,
            floor=self.vllm_importance_sampling_clip_min,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
        )
        loss_inputs |= {"old_per_token_logps": terms.old_logps, "importance_sampling_ratio": terms.weight}
        self.epsilon_low, self.epsilon_high = terms.epsilon_low, terms.epsilon_high
        sums = loss_sums(policy_logps, proximal_logps, terms, loss_inputs["advantages"], learned, epsilon_high)
        metrics = loss_metrics(self.accelerator.reduce(sums, reduction="sum"), self.args.objective == "acr")
        self._record(mode, metrics)

    def _ends_rollout(self, mode: str) -> bool:
        """Whether this was the last part of a rollout; in evaluation each is one."""
        return mode == "eval" or self._step % self.args.steps_per_generation == 0

    @property
    def _cap(self) -> float:
        cap = self.vllm_importance_sampling_clip_max
        return float("inf") if cap is None else cap

    def _record(self, mode: str, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        checkpoint = f"{self._get_output_dir(trial=trial)}/{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        state = RolloutState(self._step, self._buffered_inputs, self.prompts_drawn)
        save_rollout_state(state, checkpoint, self.accelerator.process_index)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        skip_epochs(self._train_sampler, epochs_done(checkpoint))
        state = load_rollout_state(checkpoint, self.accelerator.process_index, self.accelerator.device)
        if state is not None:
            self._step, self._buffered_inputs, self.prompts_drawn = state


def learned_tokens(inputs: dict[str, Any]) -> torch.Tensor:
    """Completion tokens that the model produced and learns from, bool (B, T): no padding, no tool output."""
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    return mask.bool()


def named_arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """A call's arguments by name, as TRL's constructor names them.

    Bound to its signature, so that our constructors are TRL's by construction, positions included.
    """
    parameters = list(inspect.signature(GRPOTrainer.__init__).parameters.values())[1:]  # without self
    return inspect.Signature(parameters).bind(*args, **kwargs).arguments


def _require_vllm(config: Any) -> None:
    if not is_vllm_available():
        even = " (TRL imports it here even though a server generates)" if _uses_server(config) else ""
        raise ImportError(
            f"Quantized rollouts need vLLM, which is not installed{even}: run `pip install trl-qurl[vllm]`, or train "
            "with trl.GRPOTrainer and use_vllm=False."
        )


def _uses_server(config: Any) -> bool:
    return isinstance(config, QuRLGRPOConfig) and config.vllm_mode == "server"


def _uaq_callbacks(model: Any, peft_config: Any, scale: float) -> list[UpdateAwareQuantizationCallback]:
    if peft_config is not None or (not isinstance(model, str) and is_peft_model(model)):
        warnings.warn(
            f"uaq_scale={scale} is not applied: an adapter trained on rescaled weights would not fit the original "
            "model that users load it on. Set uaq_scale=1.0 to say so yourself.",
            stacklevel=3,
        )
        return []
    return [UpdateAwareQuantizationCallback(scale)]


def _rollout_settings(config: QuRLGRPOConfig) -> RolloutSettings:
    name = config.rollout_quantization
    return RolloutSettings(
        scheme=None if name is None else get_scheme(name),
        ignore=tuple(config.quantization_ignore),
        is_served=config.vllm_mode == "server",
        weight_sync=config.weight_sync,
        checkpoint_dir=config.rollout_checkpoint_dir,
        engine_kwargs=config.engine_kwargs,
        weight_metrics_interval=config.weight_metrics_interval,
        sync_check_interval=config.sync_check_interval,
        sync_probe=config.sync_probe,
        request_timeout=config.vllm_request_timeout,
    )
