"""Quantized rollouts for any trainer of TRL that builds a `VLLMGeneration`: an engine in sync with
the policy.
"""

import functools
import inspect
import os
import time
import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import get_config_model_id

from trl_qurl.quantization.plan import Formats, format_name, make_plan, require_formats
from trl_qurl.quantization.storage import set_dtype
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.ahead import AheadVLLMGeneration
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.prompts import check_special_tokens
from trl_qurl.rollout.recovery import raise_everywhere
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.arguments import (
    applies_uaq,
    check_adapter,
    check_full_precision,
    checked_config,
    rollout_settings,
)
from trl_qurl.trainers.callbacks import (
    RunLogCallback,
    SavingBetweenSteps,
    TrainerAwareCallback,
    UpdateAwareQuantizationCallback,
)
from trl_qurl.trainers.learning import LearningWatch, check_trainable
from trl_qurl.trainers.model_card import add_rollouts, quantized_card
from trl_qurl.trainers.resuming import (
    check_complete,
    check_loaded,
    last_complete_checkpoint,
    load_policy,
    read_whole,
    warn_of_new_optimizer,
    written_whole,
)
from trl_qurl.trainers.run_log import check_unused
from trl_qurl.trainers.saving import write_quantized

# to mypy, the mixin has all that a trainer has: it allows no `super()` into a protocol
TRLTrainer: Any = object


class StepTimer(TrainerAwareCallback):
    """Callback that times each optimizer step (forward, backward, clipping, update) without
    rollouts inside it.
    """

    started: float = 0.0  # when the step began, moved forward by the time of rollouts inside it

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the duration of the step in seconds, including the optimizer's update."""
        self.trainer._record({"time/update_s": time.perf_counter() - self.started})


class QuantizedEngineMixin(TRLTrainer):
    """Mixin for TRL trainers that generates with an actor: a quantized copy of the policy, updated
    at every sync.

    It also applies update-aware quantization, logs the cost of rollouts, and saves quantized
    checkpoints. List it before the trainer in the bases, and set the three class attributes.

    Attributes:
        _config_class: The trainer's config class, with the fields of [`QuantizedRolloutsConfig`].
        _generation_module: The module in which the trainer looks up `VLLMGeneration`.
        _algorithm: Name of the algorithm, for model cards and logs.
    """

    _config_class: ClassVar[type]
    _generation_module: ClassVar[ModuleType]
    _algorithm: ClassVar[str]

    accelerator: Accelerator
    state: TrainerState
    vllm_generation: QuantizedVLLMGeneration
    _metrics: dict[str, dict[str, list[float]]]

    # TRL sends weights unless this is the current step. Its own value misses weights that change
    # between two steps.
    _last_loaded_step = property(
        lambda self: self.vllm_generation.loaded_step(), lambda self, step: None
    )

    # whether smoothing learns from all passes of the loss, or a trainer chooses some
    _smooths_by_loss = True

    def __init__(self, *positional: Any, **kwargs: Any) -> None:
        arguments = dict(
            inspect.signature(super().__init__).bind_partial(*positional, **kwargs).arguments
        )
        arguments |= arguments.pop("kwargs", {})  # some trainers leave the rest to their parent
        args = arguments["args"] = checked_config(
            type(self), arguments.get("args"), arguments.get("model")
        )
        self._before_engine(args, arguments)
        self._step_timer = StepTimer()
        self._saving = SavingBetweenSteps()
        # Ours go first: rows logged by user callbacks belong in run.jsonl, their time in no step.
        run_log = RunLogCallback(
            {"updates_per_rollout": args.updates_per_rollout, "algorithm": self._algorithm}
        )
        self._run_log = run_log
        uaq = (
            [UpdateAwareQuantizationCallback(args.uaq_scale)]
            if applies_uaq(args, arguments)
            else []
        )
        self._learning = LearningWatch()
        ours = [*uaq, self._step_timer, self._saving, run_log, self._learning]
        arguments["callbacks"] = [*ours, *(arguments.get("callbacks") or [])]
        # vLLM freezes the garbage collector, so a reference cycle through the trainer would keep
        # its engine.
        trainer = weakref.proxy(self)
        generation = functools.partial(
            AheadVLLMGeneration if args.rollouts_ahead else QuantizedVLLMGeneration,
            rollout=rollout_settings(args),
            global_step=lambda: trainer.state.global_step,
            prompts=lambda: trainer._first_prompts(),
        )

        def start(**settings: Any) -> QuantizedVLLMGeneration:
            trainer._before_start()
            return generation(**settings)

        with substitute(self._generation_module, "VLLMGeneration", start):
            super().__init__(**arguments)
        for callback in self.callback_handler.callbacks:
            self._set_trainer(callback)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as the parent does, while no other run may train with this output directory.

        `True` resumes from the last checkpoint that is complete.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(last_complete_checkpoint(self.args.output_dir))
        elif resume_from_checkpoint:
            resume_from_checkpoint = str(check_complete(resume_from_checkpoint))
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._run_log.close()

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        checkpoint = Path(self._get_output_dir(trial=trial), name)
        if self._saving.moves(checkpoint):
            return
        with written_whole(checkpoint, self.args.should_save):
            # before transformers' last file, by which a checkpoint counts as complete
            self._save_rollout(checkpoint)
            super()._save_checkpoint(model, trial)

    def _save_rollout(self, checkpoint: Path) -> None:
        """Add to a checkpoint what a resumed run needs besides transformers' own files."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoint = Path(resume_from_checkpoint)
        with read_whole(checkpoint):
            if self.is_fsdp_enabled or not load_policy(self.model, checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not load_policy(self.model, best):
            super()._load_best_model()
        self._check_policy(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with read_whole(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # which have other files
            warn_of_new_optimizer(Path(checkpoint))
        self._check_policy(Path(checkpoint))

    def _check_policy(self, checkpoint: Path) -> None:
        """Raise `RuntimeError` unless the policy is the checkpoint's."""
        if self.is_deepspeed_enabled:  # ZeRO's checkpoints hold other tensors
            return
        policy = self.accelerator.unwrap_model(self.model)
        is_reader = self.is_world_process_zero()
        raise_everywhere(lambda: check_loaded("policy", policy, checkpoint, is_reader))

    def _before_engine(self, args: Any, arguments: dict[str, Any]) -> None:
        """Check the constructor's arguments, by TRL's names. What may fail belongs before the
        engine's slow start.
        """
        model = arguments["model"]
        check_full_precision(
            model, arguments.get("quantization_config"), args.model_init_kwargs or {}
        )
        check_adapter(model, arguments.get("peft_config"))
        directory = Path(args.output_dir or ".")
        raise_everywhere(lambda: check_unused(directory) if args.process_index == 0 else None)

    def _before_start(self) -> None:
        """Check the model, the tokenizer and the data, which TRL has loaded by now. The engine
        starts next.
        """
        check_trainable(self.model, "The policy")
        # of a processor
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        check_special_tokens(tokenizer, self.model.config.get_text_config().vocab_size)

    def _first_prompts(self) -> list[list[int]]:
        """Return the tokens of a few prompts, to which smoothing is fitted before the engine
        starts, or none.
        """
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
        with self.vllm_generation.rollout_context() as rollout:
            inputs = super()._prepare_inputs(generation_batch)
            if rollout.used_engine:
                self._record_cost()
        # a rollout is not part of the update
        self._step_timer.started += time.perf_counter() - started
        return inputs

    def _record_cost(self) -> None:
        cost = self.vllm_generation.pop_cost()
        tokens = self._sum_over_processes(
            torch.tensor([float(cost.tokens)], device=self.accelerator.device)
        ).item()
        metrics = {
            "time/quantize_s": cost.quantize_s,
            "time/sync_s": cost.sync_s,
            "time/sync_check_s": cost.check_s,
            "sync/sent_mb": cost.sent_bytes / 1e6,
            "sync/recoveries": float(cost.recoveries),
            "time/generate_s": cost.generate_s,
            "throughput/generated_tokens_per_s": tokens / cost.generate_s
            if cost.generate_s
            else 0.0,
        }
        self._record(metrics | cost.metrics)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss, as the parent does."""
        with self._watch_activations(self._smooths_by_loss and self.model.training):
            return super().compute_loss(*args, **kwargs)

    def _watch_activations(self, is_scoring: bool) -> AbstractContextManager[None]:
        """Let smoothing learn from the forward passes inside the block, if they score the current
        rollout.
        """
        smoothing = self.vllm_generation.weights.smoothing
        return smoothing.watch() if smoothing is not None and is_scoring else nullcontext()

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, reduction="sum")

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _record(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole policy, as the parent does, to `output_dir` or else the run's output
        directory.
        """
        # would save no sharded weights
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        with substitute(plugin, "state_dict_type", "FULL_STATE_DICT") if plugin else nullcontext():
            super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            set_dtype(Path(output_dir or self.args.output_dir), self.vllm_generation.weights.grid)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, with a section about the rollouts."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            add_rollouts(self._algorithm, self.args, self.vllm_generation)

    def save_quantized(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        formats: Formats = None,
        *,
        ignore: Collection[str] | None = None,
        merge: bool = False,
    ) -> Path:
        """Write a quantized checkpoint of the current policy, without a critic, and return its
        directory.

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
        args, generation = self.args, self.vllm_generation
        formats = args.rollout_quantization if formats is None else formats
        formats = require_formats(formats, "formats")
        ignore = (
            args.quantization_ignore
            if ignore is None
            else [ignore]
            if isinstance(ignore, str)
            else list(ignore)
        )
        run = Path(args.output_dir).absolute()
        path = (
            run.with_name(f"{run.name}-{format_name(formats)}")
            if output_dir is None
            else Path(output_dir)
        )
        is_rollouts = (str(formats), ignore) == (
            str(args.rollout_quantization),
            args.quantization_ignore,
        )
        model, weights = generation.model, generation.weights
        # A new stream raises in every process or in none. It is not smoothed: nobody has seen its
        # activations.
        weights = weights if is_rollouts else WeightStream(model, make_plan(model, formats, ignore))
        start = get_config_model_id(self.model.config)
        start = None if not start or Path(start).is_dir() else start
        hub_name = self.hub_model_id or args.hub_model_id
        card = functools.partial(quantized_card, path.name, weights.plan, hub_name, start)
        route = generation.sync.route
        is_separate = is_rollouts and not merge and not route.is_merged
        write_quantized(generation, path, weights, card, route if is_separate else None)
        return path
