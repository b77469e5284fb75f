"""Quantized rollouts for any trainer of TRL with a `VLLMGeneration`: an engine in sync with it."""

import functools
import inspect
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from transformers import TrainerState
from trl import GRPOConfig, RLOOConfig

from trl_qurl.quantization.plan import Formats
from trl_qurl.quantization.storage import set_dtype
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.cost import RolloutCost
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.arguments import checked_config, rollout_settings
from trl_qurl.trainers.callbacks import (
    RolloutCallback,
    RunLogCallback,
    UpdateAwareQuantizationCallback,
)
from trl_qurl.trainers.checks.guard import MismatchGuard
from trl_qurl.trainers.checks.learning import LearningWatch
from trl_qurl.trainers.checks.listed_tokens import warn_of_cuts
from trl_qurl.trainers.checks.policy import PolicyCheck
from trl_qurl.trainers.checks.resuming import (
    check_policy,
    check_resumed,
    complete_checkpoint,
    reading,
)
from trl_qurl.trainers.resuming import is_sharded, load_policy
from trl_qurl.trainers.saving import save_quantized
from trl_qurl.trainers.scoring import Rollout


class StepTimer(RolloutCallback):
    """Callback that times each optimizer step (forward, backward, clipping, update) on its own."""

    started: float = 0.0  # when the step began, moved forward by the time of rollouts inside it

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the duration of the step in seconds, including the optimizer's update."""
        self.trainer._record({"time/update_s": time.perf_counter() - self.started})


TRLTrainer: Any = object  # to mypy, which allows no `super()` into a protocol


class QuantizedEngineMixin(TRLTrainer):
    """Mixin for TRL trainers that generates with an actor: a quantized copy of the policy.

    The actor is updated at every sync, and proves on the tokens it samples that it computes the
    policy's function. The mixin also applies update-aware quantization, logs the cost of rollouts,
    resumes from complete checkpoints alone, and saves quantized ones. List it before the trainer in
    the bases, and set the three class attributes.

    Attributes:
        _config_class: The trainer's config class, with the fields of [`QuantizedRolloutsConfig`].
        _generation_module: The module in which the trainer looks up `VLLMGeneration`.
        _algorithm: Name of the algorithm, for `run.jsonl`.
    """

    _config_class: ClassVar[type]
    _generation_module: ClassVar[ModuleType]
    _algorithm: ClassVar[str]

    accelerator: Accelerator
    state: TrainerState
    vllm_generation: QuantizedVLLMGeneration
    _rollout: Rollout  # the latest
    _metrics: dict[str, dict[str, list[float]]]

    _smooths_by_loss = True  # whether smoothing learns from all passes of the loss, or from some
    _scores_rollouts = False  # whether the trainer compares all completions with the policy
    _listed_count = 0  # tokens that the engine lists per position, if the trainer reads them

    def __init__(self, *positional: Any, **kwargs: Any) -> None:
        try:
            arguments = inspect.signature(super().__init__).bind(*positional, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}.__init__() {error}") from None
        arguments |= arguments.pop("kwargs", {})  # some trainers leave the rest to their parent
        args = checked_config(type(self), arguments.get("args"))
        arguments["args"] = args
        self._step_timer = StepTimer()
        logged = {"updates_per_rollout": args.updates_per_rollout, "algorithm": self._algorithm}
        self._run_log = RunLogCallback(logged)
        # Ours go first: rows logged by user callbacks belong in run.jsonl, their time in no step.
        callbacks = [self._step_timer, self._run_log, *self._checks(args)]
        if args.uaq_scale != 1.0:
            callbacks.insert(0, UpdateAwareQuantizationCallback(args.uaq_scale))
        given = arguments.get("callbacks") or []
        callbacks += [each() if isinstance(each, type) else each for each in given]
        self._callbacks = callbacks
        arguments["callbacks"] = self._callbacks
        for callback in self._callbacks:
            self._set_trainer(callback)
        self._tell("on_arguments", args, arguments)
        with substitute(self._generation_module, "VLLMGeneration", self._backend_factory(args)):
            super().__init__(**arguments)
        self._callbacks = self.callback_handler.callbacks
        for callback in self._callbacks:  # TRL's
            self._set_trainer(callback)
        self._forget_rollout()
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

    def _forget_rollout(self) -> None:
        """Begin with a new rollout, because one that was interrupted is of other weights.

        A checkpoint brings its own.
        """
        self._rollout = Rollout(self.vllm_generation)

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
        before = self._rollout
        recorded = {name: len(values) for name, values in self._metrics[self._mode].items()}
        inputs = super()._prepare_inputs(generation_batch)
        if not generation.cost.is_zero:  # else TRL had this batch already
            if self._rollout is before:  # the trainer has not begun one
                self._rollout = Rollout(generation)
            self._end_rollout(recorded)
        self._step_timer.started += time.perf_counter() - started  # not a part of the update
        return inputs

    def _end_rollout(self, recorded: Mapping[str, int]) -> None:
        """Let callbacks read the rollout, and log what it has cost.

        `recorded` is how many values of each metric are older.
        """
        metrics = {
            name: values[-1]
            for name, values in self._metrics[self._mode].items()
            if len(values) > recorded.get(name, 0)
        }
        cost = self.vllm_generation.cost.take()
        self._rollout.end(metrics, cost)
        self._tell("on_rollout", self._rollout)
        cost.check_s += self.vllm_generation.cost.take().check_s  # of a proof
        self._record_cost(cost)

    def _record_cost(self, cost: RolloutCost) -> None:
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

    # Kept on disk

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as the parent does, while no other run may train with this output directory.

        It begins with a new rollout. `True` resumes from the last checkpoint that is complete.
        """
        self._forget_rollout()
        checkpoint = complete_checkpoint(resume_from_checkpoint, self.args.output_dir)
        try:
            return super().train(None if checkpoint is None else str(checkpoint), *args, **kwargs)
        finally:
            self._run_log.close()

    def _save_rest(self, checkpoint: Path) -> None:
        """Add to a checkpoint what a resumed run needs besides transformers' own files."""

    def _load_rest(self, checkpoint: Path) -> None:
        """Load what `_save_rest` has added."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        # Before transformers' last file, by which a checkpoint counts as complete.
        self._save_rest(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                check_resumed(self, Path(checkpoint))
                self._load_rest(Path(checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoint = Path(resume_from_checkpoint)
        with reading(checkpoint):
            if is_sharded(self.accelerator) or not load_policy(self.model, checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if is_sharded(self.accelerator) or not load_policy(self.model, best):
            super()._load_best_model()
        check_policy(self, best)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole policy, as the parent does, to `output_dir` or the run's own directory."""
        whole: AbstractContextManager[None] = nullcontext()
        if self.is_fsdp_enabled:  # the plugin's own type of state would save no sharded weights
            plugin = self.accelerator.state.fsdp_plugin
            whole = substitute(plugin, "state_dict_type", "FULL_STATE_DICT")
        with whole:
            super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            set_dtype(Path(output_dir or self.args.output_dir), self.vllm_generation.weights.grid)

    def save_quantized(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        formats: Formats = None,
        *,
        ignore: Collection[str] | None = None,
        merge: bool = False,
    ) -> Path:
        """Write a quantized checkpoint of the current policy, without a critic; return its path.

        `vllm serve` loads it. In the rollouts' format it holds what the engine would be sent,
        smoothed as in the rollouts. An adapter is merged into the weights, unless rollouts kept it
        separate (`weight_sync="adapter"`): then it is in `adapter/`. With UAQ, the config records
        the scale. Unquantized weights keep their training dtype. Training can continue afterwards.
        In a distributed run, every process must call this.

        Args:
            output_dir: Directory to create; defaults to `{args.output_dir}-{formats}`, which
                `push_to_hub` does not upload. An existing quantized checkpoint is replaced once the
                new one is complete.
            formats: Name of a format, or names by pattern; defaults to the rollouts',
                `args.rollout_quantization`.
            ignore: Modules to keep in full precision; defaults to those of the rollouts,
                `args.quantization_ignore`.
            merge: Whether to merge an adapter that rollouts kept separate. With another format or
                other modules to ignore than the rollouts', it is always merged.

        Raises:
            ValueError: A format is missing or unknown, or as `make_plan` does.
            OSError: The directory holds something other than a quantized checkpoint, or cannot be
                written.
        """
        return save_quantized(self, output_dir, formats, ignore, merge)
