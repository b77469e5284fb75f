"""Configuration of the trainers: TRL's, plus what quantized rollouts add.

Everything that cannot work together is refused here, before a model is loaded, with the way out in the message.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from trl import GRPOConfig

from trl_qurl.config.checks import as_dictionary, check_choice
from trl_qurl.config.dynamic_sampling import DynamicSamplingSettings
from trl_qurl.config.task_evaluation import TaskEvaluationSettings
from trl_qurl.objective import get_objective
from trl_qurl.quantization.checkpoint import QUANTIZERS, require_llmcompressor
from trl_qurl.quantization.schemes import get_scheme

VLLM_MODES = ("colocate", "server")

WEIGHT_SYNCS = ("auto", "stream", "checkpoint")

UAQ_SCALE = 1.5
UAQ_LEARNING_RATE = 1e-5
"""The paper has UAQ on at 1e-6 and off at 1e-5."""

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""TRL's losses that clamp the ratio on both sides and average over tokens: what the paper's objectives are made of."""

TAKEN_ENGINE_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "model": "the trainer's `model`",
        "tensor_parallel_size": "vllm_tensor_parallel_size",
        "gpu_memory_utilization": "vllm_gpu_memory_utilization",
        "max_model_len": "vllm_max_model_length",
        "max_num_seqs": "per_device_train_batch_size and steps_per_generation",
        "enable_sleep_mode": "vllm_enable_sleep_mode",
        "model_impl": "vllm_model_impl",
        "distributed_executor_backend": "the launcher (TRL fixes it)",
        "seed": "seed (TRL gives every engine its own)",
        "max_num_batched_tokens": "nothing: TRL fixes it at 4096",
        "logprobs_mode": "nothing: the importance ratio needs 'processed_logprobs'",
        "quantization": "rollout_quantization",
        "trust_remote_code": "trust_remote_code",
        "worker_extension_cls": "trl-qurl, whose worker loads the weights",
    }
)
"""Arguments of the colocated engine that are already taken, and what sets them instead."""


@dataclass
class QuRLGRPOConfig(DynamicSamplingSettings, TaskEvaluationSettings, GRPOConfig):
    r"""
    [`~trl.GRPOConfig`] plus the settings of quantized rollouts. Only new fields, and those whose default changes, are
    listed.

    > Rollout format

    Args:
        rollout_quantization (`str` or `None`, *optional*, defaults to `"int8"`):
            Format of the rollout policy: `"int8"` (W8A8: weights per output channel, activations per token), `"fp8"`
            (E4M3, same granularity), or `None` for rollouts in the engine's own dtype (BF16). On the command line,
            `none` means `None`.
        quantization_ignore (`list[str]`, *optional*, defaults to `["lm_head"]`):
            Modules kept in full precision, in llm-compressor's pattern syntax (`"re:.*down_proj"`).
        quantizer (`str`, *optional*, defaults to `"streaming"`):
            Who makes the 8-bit weights at each step: `"streaming"`, our stream, or `"llmcompressor"`, a full
            llm-compressor checkpoint per step (the reference; slow).
        uaq_scale (`float` or `None`, *optional*):
            Update-Aware Quantization's s (Sec. 4.3); `1.0` turns it off. By default `1.5`, the best value of Table 4,
            where rollouts are quantized and the learning rate is below 1e-5, else `1.0`: the paper leaves it off at
            1e-5, and at 1e-4 it costs accuracy (docs/results.md). Off by default with `sync_ref_model` too. Not
            applied to PEFT models.

    > Weight sync

        weight_sync (`str`, *optional*, defaults to `"auto"`):
            `"stream"` sends tensors (in process, or over TRL's NCCL weight transfer), `"checkpoint"` writes them for
            the engine to reload. `"auto"` streams to a colocated engine, and to a server if both sides have NCCL;
            otherwise it writes checkpoints. What was chosen, and why, is logged.
        rollout_checkpoint_dir (`str` or `None`, *optional*):
            Directory for those checkpoints. With a server, it must see the same directory. By default memory
            (`/dev/shm`) where there is room, else the system's temporary directory. Removed at the end of the run.
        sync_check_steps (`int`, *optional*, defaults to `16`):
            Syncs between checks of the engine: digests of all tensors on both sides, and the probe. The first sync is
            always among them; `0` for none. The version of the weights is checked at every sync.
        sync_probe (`bool`, *optional*, defaults to `True`):
            Whether those checks include the probe: the engine's log-probabilities of fixed prompts against the
            trainer's own quantized forward pass. Left out under FSDP 1 and ZeRO-3, whose layers are never whole.
        vllm_request_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds a request to the server may take (a rollout is many requests, one per prompt) before it counts as
            hanging and training stops.
        vllm_engine_kwargs (`dict`, *optional*, defaults to `{}`):
            Further arguments of the colocated `vllm.LLM` (`enforce_eager`, `kv_cache_dtype`, ...).

    > Objective

        objective (`str`, *optional*, defaults to `"acr"`):
            `"acr"` (QuRL, Eq. 9), `"tis"` (FlashRL, Eq. 5), `"decoupled"` (Eq. 4), `"quantized_ratio"` (Eq. 3) or
            `"naive"` (Eq. 1). The cap C is `vllm_importance_sampling_clip_max`.

    > Dynamic sampling, benchmarks during training

        dynamic_sampling, dynamic_sampling_max_rounds, dynamic_sampling_reward:
            See [`DynamicSamplingSettings`].
        eval_tasks, eval_tasks_steps, eval_tasks_limit, eval_tasks_by:
            See [`TaskEvaluationSettings`].

    > Measurements

        weight_metrics_steps (`int`, *optional*, defaults to `16`):
            Rollouts between measurements of the weights (Eqs. 13 and 14, share of changed codes; Appendix A uses 16).
            They need a copy of the quantized layers' weights in host memory; `0` turns them off.

    > Changed defaults

        use_vllm (`bool`, *optional*, defaults to `True`): There is no quantized rollout without vLLM.
        vllm_importance_sampling_mode (`str`, *optional*, defaults to `"token_truncate"`): The ratio is per token.
        vllm_importance_sampling_clip_max (`float`, *optional*, defaults to `2.0`): C.

    Raises:
        ValueError: Settings that cannot work together; the message names them and the way out.
        ImportError: `quantizer="llmcompressor"` without llm-compressor.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    use_vllm: bool = field(
        default=True, metadata={"help": "Whether to generate with vLLM. Quantized rollouts need it."}
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={"help": "How TRL forms the importance ratio. The objectives here are per token: 'token_truncate'."},
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=2.0, metadata={"help": "Cap C of the importance ratio (a ratio, not a log)."}
    )

    # Rollout format
    rollout_quantization: str | None = field(
        default="int8", metadata={"help": "Format of the rollout policy: 'int8', 'fp8', or 'none' for BF16."}
    )
    quantization_ignore: list[str] = field(
        default_factory=lambda: ["lm_head"],
        metadata={"help": "Modules kept in full precision, in llm-compressor's pattern syntax."},
    )
    quantizer: str = field(
        default="streaming",
        metadata={"help": "Who makes the 8-bit weights each step: 'streaming' or 'llmcompressor'."},
    )
    uaq_scale: float | None = field(
        default=None,
        metadata={
            "help": "Update-Aware Quantization's s (a ratio); 1.0 turns it off. By default 1.5 below learning rate "
            "1e-5, else off."
        },
    )

    # Weight sync
    weight_sync: str = field(
        default="auto", metadata={"help": "How weights reach the engine: 'auto', 'stream' or 'checkpoint'."}
    )
    rollout_checkpoint_dir: str | None = field(
        default=None, metadata={"help": "Directory for checkpoints the engine loads. Chosen if not given."}
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default_factory=dict,
        metadata={"help": "Further arguments of the colocated vLLM engine, as a JSON dictionary."},
    )

    sync_check_steps: int = field(
        default=16, metadata={"help": "Syncs between checks of the engine by digest and probe; 0 for none."}
    )

    sync_probe: bool = field(
        default=True, metadata={"help": "Whether those checks include the engine's log-probabilities of a probe."}
    )

    vllm_request_timeout: float = field(
        default=1800.0, metadata={"help": "Seconds a request to the vLLM server may take before training stops."}
    )

    # Objective
    objective: str = field(
        default="acr", metadata={"help": "Objective: 'acr', 'tis', 'decoupled', 'quantized_ratio' or 'naive'."}
    )

    # Measurements
    weight_metrics_steps: int = field(
        default=16, metadata={"help": "Rollouts between measurements of the weights (Eqs. 13 and 14); 0 for none."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rollout_quantization, str) and self.rollout_quantization.lower() in ("none", "bf16"):
            self.rollout_quantization = None
        if isinstance(self.quantization_ignore, str):  # one pattern, as YAML may give it
            self.quantization_ignore = [self.quantization_ignore]
        self._check_rollout()
        self._check_objective()
        self.check_dynamic_sampling()
        self.check_task_evaluation()
        self._warn_if_inert()

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """`vllm_engine_kwargs` as a dictionary, which the command line gives as JSON."""
        return as_dictionary("vllm_engine_kwargs", self.vllm_engine_kwargs, example='{"enforce_eager": true}')

    @property
    def weight_transport(self) -> str:
        """`weight_sync` with `"auto"` decided as far as it can be before a server is asked."""
        if self.weight_sync != "auto":
            return self.weight_sync
        if self.quantizer == "llmcompressor":
            return "checkpoint"
        return "auto" if self.vllm_mode == "server" else "stream"

    @property
    def updates_per_rollout(self) -> float:
        """Optimizer updates made with the tokens of one rollout."""
        return self.num_iterations * self.steps_per_generation / self.gradient_accumulation_steps

    def _check_rollout(self) -> None:
        if not self.use_vllm:
            raise ValueError(
                "use_vllm=False leaves no rollout to quantize: keep use_vllm=True, or train with trl.GRPOTrainer."
            )
        if self.rollout_quantization is not None:
            get_scheme(self.rollout_quantization)
        check_choice("vllm_mode", self.vllm_mode, VLLM_MODES)
        check_choice("quantizer", self.quantizer, QUANTIZERS)
        check_choice("weight_sync", self.weight_sync, WEIGHT_SYNCS)
        if self.quantizer == "llmcompressor":
            require_llmcompressor()
            if self.world_size > 1:
                raise ValueError(
                    f"quantizer='llmcompressor' works in one process, and this run has {self.world_size}: as soon as "
                    "there are several, llm-compressor waits for all of them, while one writes the checkpoint. Use "
                    "quantizer='streaming', which makes the same codes and scales."
                )
            if self.weight_sync == "stream":
                raise ValueError(
                    "quantizer='llmcompressor' makes checkpoints, which weight_sync='stream' cannot send: set "
                    "weight_sync='checkpoint' (or 'auto'), or quantizer='streaming'."
                )
        if self.uaq_scale is None:
            updates_are_small = self.learning_rate < UAQ_LEARNING_RATE
            wanted = self.rollout_quantization is not None and updates_are_small and not self.sync_ref_model
            self.uaq_scale = UAQ_SCALE if wanted else 1.0
        if self.sync_ref_model and self.uaq_scale != 1.0:
            raise ValueError(
                f"sync_ref_model=True mixes the policy's weights, which uaq_scale={self.uaq_scale} rescales, into a "
                "reference model that is not rescaled: set uaq_scale=1.0, or sync_ref_model=False."
            )
        if not 0 < self.uaq_scale < float("inf"):
            raise ValueError(
                f"uaq_scale is {self.uaq_scale}, but weights are divided by it: it must be positive and finite (the "
                "paper uses 1.5; 1.0 turns UAQ off)."
            )
        if not self.vllm_request_timeout > 0:
            raise ValueError(
                f"vllm_request_timeout is {self.vllm_request_timeout}: give a positive number of seconds."
            )
        for name in ("weight_metrics_steps", "sync_check_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number of rollouts, or 0 for none.")
        engine_kwargs = self.engine_kwargs
        if engine_kwargs and self.vllm_mode == "server":
            raise ValueError(
                f"vllm_engine_kwargs {sorted(engine_kwargs)} would have no effect with vllm_mode='server': "
                "pass them to `trl-qurl serve` instead, which hands them on to vLLM."
            )
        for argument in engine_kwargs.keys() & TAKEN_ENGINE_ARGUMENTS.keys():
            raise ValueError(
                f"vllm_engine_kwargs sets {argument!r}, which is already set: it is governed by "
                f"{TAKEN_ENGINE_ARGUMENTS[argument]}. Remove it from vllm_engine_kwargs."
            )

    def _check_objective(self) -> None:
        objective = get_objective(self.objective)
        if not self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction=False would hide the log-probabilities that the objective and "
                "the mismatch metrics need: leave it True, and set objective='naive' for training without correction."
            )
        if self.vllm_importance_sampling_mode != "token_truncate":
            raise ValueError(
                f"vllm_importance_sampling_mode={self.vllm_importance_sampling_mode!r} does not fit "
                f"objective={self.objective!r}: the paper's ratio is per token and truncated. Use 'token_truncate', "
                "or trl.GRPOTrainer for the other modes."
            )
        if self.importance_sampling_level != "token":
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r} does not fit objective="
                f"{self.objective!r}, whose clip range is per token: use 'token'."
            )
        if self.loss_type not in CLIPPED_LOSS_TYPES:
            raise ValueError(
                f"loss_type={self.loss_type!r} does not fit objective={self.objective!r}, which is a surrogate "
                f"clipped on both sides: use one of {', '.join(map(repr, CLIPPED_LOSS_TYPES))}."
            )
        cap = self.vllm_importance_sampling_clip_max
        if objective.correction == "truncated" and (cap is None or not 0 < cap < float("inf")):
            raise ValueError(
                f"objective={self.objective!r} truncates the importance ratio, but vllm_importance_sampling_clip_max "
                f"is {cap}: give a positive cap C (the paper's setting is 2.0), or use objective='decoupled' for none."
            )
        if objective.lifts_upper_bound and self.delta is not None:
            raise ValueError(
                f"delta={self.delta} puts a second upper bound on the ratio, which takes back what objective='acr' "
                "lifts: set delta=None, or use objective='tis'."
            )

    def _warn_if_inert(self) -> None:
        if get_objective(self.objective).lifts_upper_bound and self.updates_per_rollout <= 1:
            warnings.warn(
                "With one optimizer update per rollout the policy ratio is 1 and no clip bound can bind, so "
                "objective='acr' is the same as 'tis'. To make several updates per rollout, as the paper does, set "
                "steps_per_generation above gradient_accumulation_steps, or num_iterations above 1.",
                stacklevel=4,
            )
