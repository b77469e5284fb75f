"""Quantized rollouts for any TRL trainer, whose loss corrects for the mismatch between the two policies."""

import functools
import inspect
import itertools
import os
import time
import weakref
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.utils import RepeatSampler, get_config_model_id

from trl_qurl.quantization.formats import SCHEMES
from trl_qurl.quantization.plan import Formats, format_name, make_plan, read_formats
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.ahead import AheadVLLMGeneration, UpcomingRows
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.images import plain_prompts
from trl_qurl.rollout.mismatch import MismatchTally
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.arguments import applies_uaq, check_arguments, check_prompts, checked_config, rollout_settings
from trl_qurl.trainers.callbacks import RunLogCallback, TrainerAwareCallback, UpdateAwareQuantizationCallback
from trl_qurl.trainers.dynamic_sampling import named_rewards
from trl_qurl.trainers.guard import MismatchGuard
from trl_qurl.trainers.model_card import add_rollouts, quantized_card
from trl_qurl.trainers.saving import load_rollout_state, save_rollout_state, skip_epochs, write_quantized
from trl_qurl.trainers.step_timer import StepTimer

TRLTrainer: Any = object  # to mypy, the mixin has all that a trainer has

CALIBRATION_PROMPTS, LONGEST_PROMPT = 8, 512  # for smoothing; in tokens


class QuantizedRolloutsMixin(TRLTrainer):
    """Mixin for TRL trainers that generates rollouts with a quantized copy of the policy, updated at every sync.

    It also applies update-aware quantization, logs the cost of rollouts, saves quantized checkpoints, and resumes
    inside a rollout. List it before the trainer in the bases, and set the three class attributes.

    Attributes:
        _config_class: The trainer's config class, with the fields of [`QuantizedRolloutsConfig`].
        _generation_module: The TRL module whose `VLLMGeneration` the trainer starts.
        _algorithm: Name of the algorithm, for model cards and logs.
    """

    _config_class: ClassVar[type]
    _generation_module: ClassVar[ModuleType]
    _algorithm: ClassVar[str]

    # TRL sends weights unless this is the current step. Its own value misses weights that change between two steps.
    _last_loaded_step = property(lambda self: self.vllm_generation.sync.loaded_step(), lambda self, step: None)
    _train_sampler: RepeatSampler | None = None
    _scoring_seconds = 0.0  # in forward passes of the current rollout
    _unscored: dict[str, Any] | None = None  # batch of the loss being computed, if its forward pass scores it
    _ahead: AheadVLLMGeneration | None = None  # `vllm_generation`, with `rollouts_ahead`
    _upcoming_rows: UpcomingRows | None = None

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, *positional: Any, **kwargs: Any
    ) -> None:
        args = checked_config(type(self), args, model)
        bound = inspect.signature(super().__init__).bind_partial(model, reward_funcs, args, *positional, **kwargs)
        arguments = dict(bound.arguments)
        arguments |= arguments.pop("kwargs", {})  # some trainers leave the rest to their parent
        self._before_engine(args, arguments)
        self._step_timer = StepTimer()
        self._guard = None if args.mismatch_guard == "off" else MismatchGuard(args)
        # Ours go first: rows logged by user callbacks belong in run.jsonl, their time in no step.
        run_log = RunLogCallback({"updates_per_rollout": args.updates_per_rollout, "algorithm": self._algorithm})
        uaq = [UpdateAwareQuantizationCallback(args.uaq_scale)] if applies_uaq(args, arguments) else []
        ours = filter(None, [self._step_timer, run_log, self._guard])
        arguments["callbacks"] = [*uaq, *ours, *(arguments.get("callbacks") or [])]
        # vLLM freezes the garbage collector, so a reference cycle through the trainer would keep its engine.
        trainer = weakref.proxy(self)
        generation = functools.partial(
            AheadVLLMGeneration if args.rollouts_ahead else QuantizedVLLMGeneration,
            rollout=rollout_settings(args),
            global_step=lambda: trainer.state.global_step,
            prompts=lambda: trainer._first_prompts(),
        )
        with substitute(self._generation_module, "VLLMGeneration", generation):
            super().__init__(**arguments)
        check_prompts(self)
        self._ahead = self.vllm_generation if args.rollouts_ahead else None
        self._mismatch = MismatchTally(self.accelerator)
        for callback in self.callback_handler.callbacks:
            self._set_trainer(callback)

    def _before_engine(self, args: Any, arguments: dict[str, Any]) -> None:
        """Check the constructor's arguments, by TRL's names. What may fail belongs before the engine's slow start."""
        check_arguments(args, arguments)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, and set its trainer if it needs one."""
        super().add_callback(callback)
        self._set_trainer(self.callback_handler.callbacks[-1])

    def _set_trainer(self, callback: Any) -> None:
        if isinstance(callback, TrainerAwareCallback):
            callback.trainer = self

    # Rollouts --------------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        started = time.perf_counter()
        inputs = super()._prepare_inputs(generation_batch)
        self._step_timer.exclude(time.perf_counter() - started)
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._scoring_seconds = 0.0
        ahead = self._ahead if self._mode == "train" else None
        if ahead is not None:
            ahead.upcoming = self._upcoming_prompts(inputs)
        with named_rewards(self.reward_func_names):
            batch = super()._generate_and_score_completions(inputs)
        cost = self.vllm_generation.pop_cost()
        tokens = self._sum_over_processes(torch.tensor([float(cost.tokens)], device=self.accelerator.device)).item()
        metrics = {
            "time/quantize_s": cost.quantize_s,
            "time/sync_s": cost.sync_s,
            "time/sync_check_s": cost.check_s,
            "sync/sent_mb": cost.sent_bytes / 1e6,
            "sync/recoveries": float(cost.recoveries),
            "time/generate_s": cost.generate_s,
            "time/logps_s": self._scoring_seconds,
            "throughput/generated_tokens_per_s": tokens / cost.generate_s if cost.generate_s else 0.0,
        }
        self._record(metrics | cost.metrics)
        return batch

    def _upcoming_prompts(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Return the tokens of this process's prompts in the next rollout; none if these rows' is the last."""
        micro_batches = self.args.steps_per_generation * self.num_iterations  # per rollout
        if self.state.global_step + micro_batches / self.args.gradient_accumulation_steps >= self.state.max_steps:
            return []
        if self._upcoming_rows is None:
            sampler = super()._get_train_sampler(self.train_dataset)
            skip_epochs(sampler, self.state.epoch)
            self._upcoming_rows = UpcomingRows(sampler, self.train_dataset, self.accelerator)
        following = self._upcoming_rows.after(rows)
        return super()._tokenize_prompts([row["prompt"] for row in following])[0] if following else []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the parent does, and abort a rollout that is still out at the end."""
        self._upcoming_rows = None
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._ahead is not None:
                self._ahead.drop()

    def _first_prompts(self) -> list[list[int]]:
        """Return the tokens of the first training prompts; none for multimodal policies and environments."""
        if self._is_vlm or getattr(self, "environment_factories", None) is not None:
            return []
        prompts = [row["prompt"] for row in itertools.islice(self.train_dataset, CALIBRATION_PROMPTS)]
        return [tokens[:LONGEST_PROMPT] for tokens in super()._tokenize_prompts(prompts)[0]]

    def _tokenize_prompts(self, prompts: list) -> tuple:
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        if images is not None and self.args.vllm_mode == "colocate":
            # TRL's RLOO trainer lacks `chat_template`, which is for tools.
            template = {"chat_template": vars(self).get("chat_template"), **self.chat_template_kwargs}
            arguments = self.processing_class, list(map(prepare_multimodal_messages, prompts)), prompt_ids
            self.vllm_generation.plain_prompts = plain_prompts(*arguments, **template)
        return prompt_ids, images, fields

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple:
        started, smoothing = time.perf_counter(), self.vllm_generation.weights.smoothing
        in_advance = model.training and not torch.is_grad_enabled()
        # Smoothing learns from the rollout's first pass in advance, or else from the loss's.
        scores = model.training if self._unscored is not None else in_advance and not self._scoring_seconds
        with substitute(smoothing, "watches", scores) if smoothing else nullcontext():
            if in_advance:
                model.eval()  # the engine has no dropout either
            result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            if in_advance:
                model.train()
        self._scoring_seconds += time.perf_counter() - started
        return result

    def _record_mismatch(self) -> None:
        """Log the mismatch of the rollout just scored, and pass it to the guard. Every process must call this."""
        metrics = self._mismatch.pop()
        if self._guard is not None:
            metrics |= self._guard.observe(metrics, self._mode == "train")
        self._record(metrics)

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, reduction="sum")

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _record(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _rollout_state(self) -> dict[str, Any]:
        """Return what a resumed run needs in addition to transformers' checkpoint; trainers may add to it."""
        smoothing = self.vllm_generation.weights.smoothing
        state = {"smoothing": smoothing and smoothing.state_dict(), "ahead": self._ahead and self._ahead.state()}
        # TRL's count of micro-batches so far, and the batches of its rollout.
        return state | {"step": self._step, "batches": self._buffered_inputs}

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        self._step, self._buffered_inputs = state["step"], state["batches"]
        smoothing = self.vllm_generation.weights.smoothing
        if smoothing is not None and state["smoothing"]:
            smoothing.load_state_dict(state["smoothing"])
        if self._ahead is not None:
            self._ahead.load_state(state["ahead"])

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        checkpoint = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        save_rollout_state(self._rollout_state(), checkpoint, self.accelerator, self.args)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            skip_epochs(self._train_sampler, self.state.epoch)  # `self.state` is the checkpoint's by now
            if state := load_rollout_state(Path(checkpoint), self.accelerator, self.args):
                self._load_rollout_state(state)

    # Saving ----------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole policy, as the parent does, to `output_dir` or else the run's output directory."""
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None  # would save no sharded weights
        with substitute(plugin, "state_dict_type", "FULL_STATE_DICT") if plugin else nullcontext():
            super().save_model(output_dir, _internal_call)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, with a section about the rollouts."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            generation = self.vllm_generation
            add_rollouts(self._algorithm, self.args, generation.weights.plan, generation.base is not None)

    def save_quantized(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        formats: Formats = None,
        *,
        ignore: Collection[str] | None = None,
        merge: bool = False,
    ) -> Path:
        """Write a quantized checkpoint of the current policy, without a critic, and return its directory.

        `vllm serve` loads it. In the rollouts' format it holds what the engine would be sent, smoothed as in the
        rollouts. An adapter is merged into the weights, unless rollouts kept it separate (`weight_sync="adapter"`):
        then it is in `adapter/`. With UAQ, the config records the scale. Unquantized weights keep their training
        dtype. Training can continue afterwards. In a distributed run, every process must call this.

        Args:
            output_dir: Directory to create; defaults to `{args.output_dir}-{formats}`, which `push_to_hub` does not
                upload. An existing quantized checkpoint is replaced once the new one is complete.
            formats: Name of a format, or names by pattern; defaults to the rollouts', `args.rollout_quantization`.
            ignore: Modules to keep in full precision; defaults to those of the rollouts, `args.quantization_ignore`.
            merge: Whether to merge an adapter that rollouts kept separate. With another format or other modules to
                ignore than the rollouts', it is always merged.

        Raises:
            ValueError: A format is missing or unknown, or as `make_plan` does.
            OSError: The directory holds something other than a quantized checkpoint, or cannot be written.
        """
        args, generation = self.args, self.vllm_generation
        formats = read_formats(formats or args.rollout_quantization, "formats")
        if formats is None:
            raise ValueError(
                "This run's rollouts are not quantized (rollout_quantization=None): pass "
                f"save_quantized(formats=...) one of {', '.join(map(repr, SCHEMES))}."
            )
        ignore, run = args.quantization_ignore if ignore is None else list(ignore), Path(args.output_dir).absolute()
        path = run.with_name(f"{run.name}-{format_name(formats)}") if output_dir is None else Path(output_dir)
        is_rollouts = (formats, ignore) == (args.rollout_quantization, args.quantization_ignore)
        model, weights = generation.model, generation.weights
        # A new stream raises in every process or in none. It is not smoothed: nobody has seen its activations.
        weights = weights if is_rollouts else WeightStream(model, make_plan(model, formats, ignore))
        start = get_config_model_id(self.model.config)
        start = None if not start or Path(start).is_dir() else start
        hub_name = self.hub_model_id or args.hub_model_id
        card = functools.partial(quantized_card, path.name, weights.plan, hub_name, start)
        write_quantized(generation, path, weights, card, generation.base if is_rollouts and not merge else None)
        return path
