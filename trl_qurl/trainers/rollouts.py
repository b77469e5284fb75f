"""Quantized rollouts for any TRL trainer.

    class QuRLRLOOTrainer(QuantizedRolloutsMixin, RLOOTrainer):
        _config_class = QuRLRLOOConfig     # (QuantizedRolloutsConfig, RLOOConfig)
        _generation_module = rloo_trainer  # where TRL's trainer looks up `VLLMGeneration`
        _algorithm = "RLOO"

The mixin starts TRL's trainer with an engine that holds a quantized copy of the policy, applies update-aware
quantization, logs the cost of rollouts, saves quantized checkpoints and resumes inside a rollout. The trainer's loss
corrects for the mismatch between the two policies (`grpo.py`, `rloo.py`).
"""

import dataclasses
import functools
import itertools
import time
import warnings
import weakref
from types import ModuleType
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from trl.data_utils import prepare_multimodal_messages
from trl.import_utils import is_vllm_available

from trl_qurl.quantization.formats import get_scheme
from trl_qurl.quantization.layers import AUTO
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.mismatch import MismatchTally
from trl_qurl.rollout.settings import RolloutSettings
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.arguments import LengthCheckCallback, arguments_by_name, check_arguments
from trl_qurl.trainers.callbacks import (
    RunLogCallback,
    TrainerAwareCallback,
    UpdateAwareQuantizationCallback,
)
from trl_qurl.trainers.guard import MismatchGuardCallback
from trl_qurl.trainers.rollout_state import RolloutStateMixin
from trl_qurl.trainers.saving import SavingMixin

CALIBRATION_PROMPTS, LONGEST_PROMPT = 8, 512
"""Number of prompts, and maximum tokens of each, for smoothing and `quantization_ignore="auto"`."""


class QuantizedRolloutsMixin(SavingMixin, RolloutStateMixin):
    """Mixin for TRL trainers that generates rollouts with a quantized copy of the policy, updated at every sync.

    List it before the trainer in the bases, and set the four class attributes.

    Attributes:
        _config_class: The trainer's config class, with the fields of [`QuantizedRolloutsConfig`].
        _generation_module: The TRL module whose `VLLMGeneration` the trainer starts.
        _algorithm: Name of the algorithm, for model cards and logs.
        _algorithm_citation: BibTeX entry of the algorithm, for model cards; may be empty.
    """

    _config_class: ClassVar[type]
    _generation_module: ClassVar[ModuleType]

    def __init__(self, model: Any, *positional: Any, **named: Any) -> None:
        kwargs = self._checked_arguments(model, *positional, **named)
        args = kwargs["args"]
        self._step_timer = StepTimer()
        self._scoring_seconds = 0.0
        run_log = RunLogCallback({"updates_per_rollout": args.updates_per_rollout, "algorithm": self._algorithm})
        # Ours go first: rows logged by user callbacks belong in run.jsonl, their time in no step.
        adapted = kwargs.get("peft_config") is not None or (not isinstance(model, str) and is_peft_model(model))
        self._guard = None if args.mismatch_guard == "off" else MismatchGuardCallback(args)
        guard = [] if self._guard is None else [self._guard]
        callbacks = [*_uaq_callbacks(args, adapted), self._step_timer, run_log, *guard]
        kwargs["callbacks"] = [LengthCheckCallback(), *callbacks, *(kwargs.get("callbacks") or [])]
        # Nothing below may hold the trainer: vLLM freezes the garbage collector, so reference cycles are never freed,
        # and a deleted trainer would keep its engine.
        trainer = weakref.proxy(self)
        generation = functools.partial(
            QuantizedVLLMGeneration,
            rollout=_rollout_settings(args),
            global_step=lambda: trainer.state.global_step,
            prompts=lambda: trainer._first_prompts(),
        )
        with substitute(self._generation_module, "VLLMGeneration", generation):
            super().__init__(**kwargs)
        # Replace `auto` with the layers it selected, for the log, the model card and the checkpoints.
        patterns = [pattern for pattern in args.quantization_ignore if pattern != AUTO]
        args.quantization_ignore = [*patterns, *self.vllm_generation.kept]
        self._mismatch = MismatchTally(self.accelerator)
        for callback in self.callback_handler.callbacks:
            self._set_trainer(callback)

    @classmethod
    def _checked_arguments(cls, model: Any, *positional: Any, **named: Any) -> dict[str, Any]:
        """Return the arguments by TRL's names, with a config of this trainer; raise if they cannot be used."""
        arguments = arguments_by_name(cls, (model, *positional), named)
        arguments["args"] = cls._checked_config(arguments.get("args"), model)
        check_arguments(arguments["args"], arguments)
        return arguments

    @classmethod
    def _checked_config(cls, config: Any, model: Any) -> Any:
        """Return a config of this trainer; the default one if `config` is `None`."""
        if not is_vllm_available():
            raise ImportError(
                "Quantized rollouts need vLLM, which is not installed: run `pip install 'trl-qurl[vllm]'` (TRL "
                "imports it here even if a server generates), or train with TRL's own trainer and use_vllm=False."
            )
        config_class = cls._config_class
        if config is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            return config_class(f"{name.split('/')[-1] or 'model'}-QuRL-{cls._algorithm}")
        if type(config) in config_class.__mro__ and type(config).__module__.startswith("trl."):  # GRPOConfig for ours
            fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
            # TRL has derived it from steps_per_generation, and rejects a config with both.
            return config_class(**{name: value for name, value in fields.items() if name != "generation_batch_size"})
        if not isinstance(config, config_class):
            package = config_class.__module__.partition(".")[0]
            raise TypeError(
                f"args is a {type(config).__name__}, which lacks settings of {cls.__name__}: pass a {package}."
                f"{config_class.__name__} (it takes the same fields and adds its own)."
            )
        return config

    def add_callback(self, callback: Any) -> None:
        """Add a callback, and set its trainer if it needs one."""
        super().add_callback(callback)
        self._set_trainer(self.callback_handler.callbacks[-1])

    def _set_trainer(self, callback: Any) -> None:
        if isinstance(callback, TrainerAwareCallback):
            callback.trainer = self

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        started = time.perf_counter()
        inputs = super()._prepare_inputs(generation_batch)
        self._step_timer.exclude(time.perf_counter() - started)
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._scoring_seconds = 0.0
        batch = super()._generate_and_score_completions(inputs)
        self._record(self._rollout_cost())
        return batch

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
            conversations = [prepare_multimodal_messages(prompt) for prompt in prompts]
            self.vllm_generation.images.tokenize(self.processing_class, conversations, prompt_ids, **template)
        return prompt_ids, images, fields

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        started = time.perf_counter()
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._scoring_seconds += time.perf_counter() - started
        return result

    def _record_mismatch(self) -> None:
        """Log the mismatch of the rollout just scored, and pass it to the guard. Every process must call this."""
        metrics = self._mismatch.pop()
        if self._guard is not None and self._mode == "train":
            metrics |= self._guard.observe(metrics)
        self._record(metrics)

    def _rollout_cost(self) -> dict[str, float]:
        cost = self.vllm_generation.pop_cost()
        local = torch.tensor([float(cost.tokens)], device=self.accelerator.device)
        tokens = self._sum_over_processes(local).item()
        return {
            "time/quantize_s": cost.quantize_s,
            "time/sync_s": cost.sync_s,
            "time/sync_check_s": cost.check_s,
            "sync/sent_mb": cost.sent_bytes / 1e6,
            "sync/recoveries": float(cost.recoveries),
            "time/generate_s": cost.generate_s,
            "time/logps_s": self._scoring_seconds,
            "throughput/generated_tokens_per_s": tokens / cost.generate_s if cost.generate_s else 0.0,
            **cost.probe,
        }

    def _sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, reduction="sum")

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _record(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self._mode][name].append(value)


class StepTimer(TrainerAwareCallback):
    """Callback that times each optimizer step (forward, backward, clipping, update) without rollouts inside it."""

    _started = 0.0

    def exclude(self, seconds: float) -> None:
        """Exclude these seconds from the current step."""
        self._started += seconds

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the duration of the step in seconds, including the optimizer's update."""
        self.trainer._record({"time/update_s": time.perf_counter() - self._started})


def _uaq_callbacks(args: Any, adapted: bool) -> list[UpdateAwareQuantizationCallback]:
    if args.uaq_scale == 1.0:
        return []
    if adapted:
        warnings.warn(
            f"uaq_scale={args.uaq_scale} is not applied: an adapter trained on rescaled weights would not fit the "
            "original model that users load it on. Set uaq_scale=1.0 to avoid this warning.",
            stacklevel=3,
        )
        return []
    return [UpdateAwareQuantizationCallback(args.uaq_scale)]


def _rollout_settings(args: Any) -> RolloutSettings:
    name = args.rollout_quantization
    return RolloutSettings(
        scheme=None if name is None else get_scheme(name),
        ignore=tuple(args.quantization_ignore),
        is_served=args.vllm_mode == "server",
        weight_sync=args.weight_sync,
        round_base=args.round_base,
        smooths=args.smooths,
        checkpoint_dir=args.rollout_checkpoint_dir,
        engine_kwargs=args.engine_kwargs,
        sync_check_interval=args.sync_check_interval,
        request_timeout=args.vllm_request_timeout,
    )
