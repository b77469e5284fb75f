"""Quantized rollouts for any trainer of TRL with a `VLLMGeneration`: an engine in sync with it."""

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from trl import GRPOConfig, RLOOConfig

from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.mismatch import MismatchTally
from trl_qurl.rollout.prompts import check_special_tokens
from trl_qurl.rollout.recovery import raise_everywhere
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.arguments import checked_config, rollout_settings
from trl_qurl.trainers.callbacks import (
    RunLogCallback,
    SavingBetweenSteps,
    TrainerAwareCallback,
    UpdateAwareQuantizationCallback,
)
from trl_qurl.trainers.checkpoints import CheckpointsMixin
from trl_qurl.trainers.checks.arguments import check_adapter, check_full_precision
from trl_qurl.trainers.guard import MismatchGuard
from trl_qurl.trainers.learning import LearningWatch, check_trainable
from trl_qurl.trainers.listed_tokens import warn_of_cuts
from trl_qurl.trainers.run_log import check_unused
from trl_qurl.trainers.scoring import cap_of, scored_samples


class StepTimer(TrainerAwareCallback):
    """Callback that times each optimizer step (forward, backward, clipping, update) on its own."""

    started: float = 0.0  # when the step began, moved forward by the time of rollouts inside it

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the duration of the step in seconds, including the optimizer's update."""
        self.trainer._record({"time/update_s": time.perf_counter() - self.started})


class QuantizedEngineMixin(CheckpointsMixin):
    """Mixin for TRL trainers that generates with an actor: a quantized copy of the policy.

    The actor is updated at every sync, and proves on the tokens it samples that it computes the
    policy's function. The mixin also applies update-aware quantization, logs the cost of rollouts,
    and saves quantized checkpoints. List it before the trainer in the bases, and set the three
    class attributes.

    Attributes:
        _config_class: The trainer's config class, with the fields of [`QuantizedRolloutsConfig`].
        _generation_module: The module in which the trainer looks up `VLLMGeneration`.
        _algorithm: Name of the algorithm, for model cards and logs.
    """

    _config_class: ClassVar[type]
    _generation_module: ClassVar[ModuleType]
    _algorithm: ClassVar[str]

    _metrics: dict[str, dict[str, list[float]]]

    _smooths_by_loss = True  # whether smoothing learns from all passes of the loss, or from some
    _scores_rollouts = False  # whether the trainer compares all completions with the policy
    _listed_count = 0  # tokens that the engine lists per position, if the trainer reads them

    def __init__(self, *positional: Any, **kwargs: Any) -> None:
        signature = inspect.signature(super().__init__)
        arguments = dict(signature.bind_partial(*positional, **kwargs).arguments)
        arguments |= arguments.pop("kwargs", {})  # some trainers leave the rest to their parent
        args = checked_config(type(self), arguments.get("args"))
        arguments["args"] = args
        self._before_engine(args, arguments)
        self._step_timer = StepTimer()
        self._saving = SavingBetweenSteps()
        self._learning = LearningWatch()
        logged = {"updates_per_rollout": args.updates_per_rollout, "algorithm": self._algorithm}
        self._run_log = RunLogCallback(logged)
        # Ours go first: rows logged by user callbacks belong in run.jsonl, their time in no step.
        callbacks = [self._step_timer, self._saving, self._run_log, self._learning]
        if args.uaq_scale != 1.0:
            callbacks.insert(0, UpdateAwareQuantizationCallback(args.uaq_scale))
        arguments["callbacks"] = [*callbacks, *(arguments.get("callbacks") or [])]
        with substitute(self._generation_module, "VLLMGeneration", self._backend_factory(args)):
            super().__init__(**arguments)
        logged["model_runner"] = self.vllm_generation.runner
        for callback in self.callback_handler.callbacks:
            self._set_trainer(callback)
        self._mismatch = MismatchTally(self.accelerator)
        self._guard = MismatchGuard(args, bool(self._listed_count))
        self.add_callback(self._guard)
        # Judges samples; without a history of other rollouts, if those are no samples.
        self._sample_guard = self._guard
        if self._scores_rollouts and not self._scores_samples:
            self._sample_guard = MismatchGuard(args)

    def _backend_factory(self, args: Any) -> Callable[..., QuantizedVLLMGeneration]:
        """Return what TRL calls, with settings of its own, to start the engine."""
        # vLLM freezes the garbage collector, so a reference cycle through the trainer would keep
        # its engine.
        trainer = weakref.proxy(self)
        build = functools.partial(
            QuantizedVLLMGeneration,
            global_step=lambda: trainer.state.global_step,
            prompts=lambda: trainer._first_prompts(),
        )

        def start(**settings: Any) -> QuantizedVLLMGeneration:
            trainer._before_start()
            return build(rollout=rollout_settings(args, trainer._listed_count), **settings)

        return start

    def _before_engine(self, args: Any, arguments: dict[str, Any]) -> None:
        """Check the constructor's arguments, by TRL's names, before the engine's slow start."""
        check_adapter(arguments["model"], arguments.get("peft_config"))
        directory = Path(args.output_dir or ".")
        raise_everywhere(lambda: check_unused(directory) if args.process_index == 0 else None)

    def _before_start(self) -> None:
        """Check the model, the tokenizer and the data, which TRL has loaded by now."""
        check_full_precision(self.model)
        check_trainable(self.model, "The policy")
        if not self._scores_rollouts and isinstance(self.args, GRPOConfig | RLOOConfig):
            warn_of_cuts(self.args, f"{type(self).__name__} computes them itself")
        # A processor has a tokenizer.
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        check_special_tokens(tokenizer, self.model.config.get_text_config().vocab_size)

    def _first_prompts(self) -> list[list[int]]:
        """Return the tokens of a few prompts, to which smoothing is fitted first, or none."""
        return []

    def add_callback(self, callback: Any) -> None:
        """Add a callback, and set its trainer if it needs one."""
        super().add_callback(callback)
        self._set_trainer(self.callback_handler.callbacks[-1])

    def _set_trainer(self, callback: Any) -> None:
        if isinstance(callback, TrainerAwareCallback):
            callback.trainer = weakref.proxy(self)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        started = time.perf_counter()
        inputs = super()._prepare_inputs(generation_batch)
        if not self.vllm_generation.cost.is_zero:  # else TRL had this batch already
            self._score_samples()
            self._record_cost()
        self._step_timer.started += time.perf_counter() - started  # not a part of the update
        return inputs

    @property
    def _scores_samples(self) -> bool:
        """Whether what the trainer scores is what the engine has sampled.

        What a `rollout_func` returns need not be: it may put the texts of several turns together.
        """
        return self._scores_rollouts and getattr(self, "rollout_func", None) is None

    def _score_samples(self) -> None:
        """Score a few of the completions, if a proof is due and the trainer does not score them."""
        generation = self.vllm_generation
        if self._scores_samples or not generation.sync.needs_proof:
            return
        # The policy would need images as well.
        is_useless = generation.cost.tokens == 0 or generation.samples.has_images
        useless = torch.tensor([float(is_useless)], device=self.accelerator.device)
        if self._sum_over_processes(useless).item():
            return
        tally = MismatchTally(self.accelerator)
        with generation.cost.timed("check_s"):
            for logps in scored_samples(self.model, generation.samples, generation.temperature):
                tally.add(*logps, cap_of(self.args))
        metrics = tally.pop()
        self._prove(metrics)
        if self._scores_rollouts:
            self._sample_guard.judge(metrics, self._mode == "train")
        else:
            self._record(metrics | self._guard.observe(metrics, self._mode == "train"))

    def _prove(self, metrics: Mapping[str, float]) -> None:
        """Let the guard judge whether the engine computes the policy's function."""
        is_gpu = self.accelerator.device.type == "cuda"
        is_proven = self._sample_guard.prove(metrics, self._mode == "train", asks_again=is_gpu)
        self.vllm_generation.sync.needs_proof = not is_proven

    def _record_mismatch(self) -> None:
        """Log the mismatch of the rollout just scored, and judge it. A collective operation."""
        metrics = self._mismatch.pop()
        training = self._mode == "train"
        sync = self.vllm_generation.sync
        if self._scores_samples:
            if sync.needs_proof:
                self._prove(metrics)
            elif self.args.sync_check_interval:
                # What is contradicted between two proofs asks for one: of the next rollout.
                sync.needs_proof = self._guard.is_contradicted(metrics, training)
        self._record(metrics | self._guard.observe(metrics, training))

    def _record_cost(self) -> None:
        cost = self.vllm_generation.cost.take()
        tokens = torch.tensor([float(cost.tokens)], device=self.accelerator.device)
        total = self._sum_over_processes(tokens).item()
        metrics = {
            "time/quantize_s": cost.quantize_s,
            "time/sync_s": cost.sync_s,
            "time/sync_check_s": cost.check_s,
            "sync/sent_mb": cost.sent_bytes / 1e6,
            "sync/recoveries": float(cost.recoveries),
            "time/generate_s": cost.generate_s,
            "throughput/generated_tokens_per_s": total / cost.generate_s
            if cost.generate_s
            else 0.0,
        }
        self._record(metrics | cost.metrics)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss, as the parent does."""
        with self._watch_activations(self._smooths_by_loss and self.model.training):
            return super().compute_loss(*args, **kwargs)

    def _watch_activations(self, is_scoring: bool) -> AbstractContextManager[None]:
        """Let smoothing learn from the forward passes inside, if they score the current rollout."""
        smoothing = self.vllm_generation.weights.smoothing
        if smoothing is None or not is_scoring:
            return nullcontext()
        return smoothing.watch()

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, reduction="sum")

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _record(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)
