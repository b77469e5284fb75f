"""Quantized rollouts for any trainer of TRL with a `VLLMGeneration`: an engine in sync with it."""

import functools
import inspect
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, ClassVar

import torch
from trl import GRPOConfig, RLOOConfig

from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.arguments import applies_uaq, checked_config, rollout_settings
from trl_qurl.trainers.callbacks import (
    RolloutCallback,
    RunLogCallback,
    SavingBetweenSteps,
    UpdateAwareQuantizationCallback,
)
from trl_qurl.trainers.checkpoints import CheckpointsMixin
from trl_qurl.trainers.checks.guard import MismatchGuard
from trl_qurl.trainers.checks.learning import LearningWatch
from trl_qurl.trainers.checks.policy import PolicyCheck
from trl_qurl.trainers.listed_tokens import warn_of_cuts


class StepTimer(RolloutCallback):
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
        args = checked_config(type(self), arguments.get("args"), arguments.get("model"))
        arguments["args"] = args
        self._step_timer = StepTimer()
        self._saving = SavingBetweenSteps()
        logged = {"updates_per_rollout": args.updates_per_rollout, "algorithm": self._algorithm}
        self._run_log = RunLogCallback(logged)
        # Ours go first: rows logged by user callbacks belong in run.jsonl, their time in no step.
        callbacks = [self._step_timer, self._saving, self._run_log, *self._checks(args)]
        if applies_uaq(args, arguments):
            callbacks.insert(0, UpdateAwareQuantizationCallback(args.uaq_scale))
        self._callbacks = [*callbacks, *(arguments.get("callbacks") or [])]
        arguments["callbacks"] = self._callbacks
        for callback in self._callbacks:
            self._set_trainer(callback)
        self._tell("on_arguments", args, arguments)
        with substitute(self._generation_module, "VLLMGeneration", self._backend_factory(args)):
            super().__init__(**arguments)
        self._callbacks = self.callback_handler.callbacks
        for callback in self._callbacks:  # TRL's, and those that were given as a class
            self._set_trainer(callback)
        logged["model_runner"] = self.vllm_generation.runner
        self._tell("on_engine")

    def _checks(self, args: Any) -> list[RolloutCallback]:
        """Return what a run is checked for, a callback for each question."""
        return [PolicyCheck(), LearningWatch(), MismatchGuard(args)]

    def _tell(self, event: str, *values: Any) -> None:
        """Call an event of `RolloutCallback`."""
        for callback in self._callbacks:
            if isinstance(callback, RolloutCallback):
                getattr(callback, event)(*values)

    def _backend_factory(self, args: Any) -> Callable[..., QuantizedVLLMGeneration]:
        """Return what TRL calls, with settings of its own, to start the engine."""
        # vLLM freezes the garbage collector, so a reference cycle through the trainer would keep
        # its engine.
        trainer: Any = weakref.proxy(self)
        build = functools.partial(
            QuantizedVLLMGeneration,
            global_step=lambda: trainer.state.global_step,
            prompts=lambda: trainer._first_prompts(),
        )

        def start(**settings: Any) -> QuantizedVLLMGeneration:
            trainer._tell("on_models")
            trainer._listed_count = trainer._count_listed()
            return build(rollout=rollout_settings(args, trainer._listed_count), **settings)

        return start

    def _count_listed(self) -> int:
        """Return how many tokens the engine is to list per position, because sampling cuts some."""
        if isinstance(self.args, GRPOConfig | RLOOConfig):
            warn_of_cuts(self.args, f"{type(self).__name__} computes them itself")
        return 0

    def _first_prompts(self) -> list[list[int]]:
        """Return the tokens of a few prompts, to which smoothing is fitted first, or none."""
        return []

    def add_callback(self, callback: Any) -> None:
        """Add a callback, and set its trainer if it needs one."""
        super().add_callback(callback)
        self._set_trainer(self.callback_handler.callbacks[-1])

    def _set_trainer(self, callback: Any) -> None:
        if isinstance(callback, RolloutCallback):
            callback.trainer = weakref.proxy(self)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        started = time.perf_counter()
        generation = self.vllm_generation
        generation.cost.take()  # of others that used the engine between two steps
        inputs = super()._prepare_inputs(generation_batch)
        if not generation.cost.is_zero:  # else TRL had this batch already
            self._tell("on_rollout", generation.samples, self._latest_metrics())
            self._record_cost()
        self._step_timer.started += time.perf_counter() - started  # not a part of the update
        return inputs

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

    def _latest_metrics(self) -> dict[str, float]:
        metrics = self._metrics[self._mode]
        return {name: values[-1] for name, values in metrics.items() if values}

    def _record(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)
