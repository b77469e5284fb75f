"""Settings of quantized rollouts, for the config of any TRL trainer that generates with vLLM."""

import json
import warnings
from dataclasses import dataclass, field
from math import inf
from typing import Any

from trl import GRPOConfig, RLOOConfig

from trl_qurl.config.checks import (
    check_choice,
    check_engine_arguments,
    check_number,
    check_sampling,
    check_types,
)
from trl_qurl.config.help import with_help
from trl_qurl.quantization.checkpoint import check_quantizer
from trl_qurl.quantization.formats import EXAMPLE, SCHEMES, UNQUANTIZED, check_kv_cache
from trl_qurl.quantization.plan import check_patterns, read_formats, schemes_of

TAKEN_ENGINE_ARGUMENTS = {
    "model": "the trainer's `model`",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
    "max_num_seqs": "per_device_train_batch_size and steps_per_generation",
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "model_impl": "vllm_model_impl",
    "distributed_executor_backend": "the launcher (TRL fixes it)",
    "max_num_batched_tokens": "TRL, which fixes it at 4096",
    "logprobs_mode": "trl-qurl (the importance ratio needs 'processed_logprobs')",
    "quantization": "rollout_quantization",
    "quantization_config": "rollout_quantization",
    "trust_remote_code": "trust_remote_code",
    "enable_lora": "weight_sync",
    "max_lora_rank": "peft_config",
    "worker_extension_cls": "trl-qurl (its worker loads the weights)",
}
"""Arguments of the colocated engine that users cannot set, and what governs them."""


@with_help
@dataclass
class QuantizedRolloutsConfig:
    """Mixin for TRL configs: the settings of quantized rollouts.

    > Rollout format

    Args:
        rollout_quantization: Format of the actor: a name in [`~trl_qurl.quantization.SCHEMES`], or
            `None` for unquantized rollouts in the engine's own dtype. On the command line, `none`
            means `None`. Or names by pattern, of which the first that matches wins:
            `{"re:.*down_proj": "w8a16", "*": "int8"}`. Layers that no pattern matches stay in 16
            bits.
        quantization_ignore: Modules kept in full precision before all else, in llm-compressor's
            pattern syntax. `trl-qurl mismatch --kl` finds the layers that rounding hurts most.
        uaq_scale: Scale s of update-aware quantization (Sec. 4.3), applied to the policy's weights
            once, before training. 1.0 is off; 1.5 is the best value of Table 4, at a learning rate
            of 1e-6.
        smooth_activations: Whether to shrink large activations before the engine rounds them, and
            enlarge the columns that read them (`quantization/smoothing.py`, after SmoothQuant). On
            by default if the format is INT8, the model's architecture is supported, and whole
            weights are sent. The policy's own weights do not change.

    > Weight sync

        weight_sync: How weights reach the engine: `auto`, `stream`, `checkpoint`, `adapter` or
            `llmcompressor`. `stream` sends tensors (in process or over NCCL), `checkpoint` writes
            them for the engine to reload. `adapter` sends only the LoRA adapter, to an engine that
            has the frozen base, quantized once; the others merge it. `auto` sends the adapter to a
            server that accepts adapters, streams where both sides can, and otherwise writes
            checkpoints, and logs why. `llmcompressor` is the slow reference: it writes each sync.
        round_base: Whether the trainer replaces the frozen base below a LoRA adapter with the
            values that the engine's codes represent, so actor and policy have the same weights.
            Implies `weight_sync="adapter"`.
        rollout_checkpoint_dir: Directory for checkpoints that the engine loads; a server must see
            it too. Defaults to memory (`/dev/shm`) if there is room, else to the system's temporary
            directory. Removed after the run.
        vllm_request_timeout: Seconds a request to the vLLM server may take before it counts as
            failed.
        vllm_engine_kwargs: Extra arguments of the colocated `vllm.LLM` (`enforce_eager`,
            `block_size`, ...), as a dictionary.
        rollouts_ahead: With 1, a server generates the next rollout while the trainer learns from
            the current one, so a rollout's weights are one rollout old (`rollout/ahead.py`). 0 is
            off. Needs `vllm_mode="server"`.

    > Importance ratio

        importance_cap: Cap C of the importance ratio ρ of a token (a ratio, not a log), which `acr`
            and `tis` limit. `None` (on the command line, `inf`) is no cap. FlashRL uses 2, and the
            paper gives no value. `mismatch/capped_share` counts the tokens above it, whatever the
            objective.

    > Checks

        sync_check_interval: Syncs between probes of the engine; 0 for none, and no digests, which
            otherwise compare all tensors on both sides at every sync. The probe compares the
            engine's log-probabilities of fixed prompts with the trainer's own quantized forward
            pass, where it has one; always at the first sync, and over NCCL.

    > Guard

        mismatch_guard: What to do when rounding does not explain how far actor and policy differ:
            `off`, `warn` or `stop`. `warn` warns once per alarm; `stop` also saves a checkpoint and
            ends training.
        mismatch_guard_kl: KL of a rollout (`mismatch/kl_k3`, nats per token) at which the guard
            acts at the latest.

    > Changed default

        use_vllm: Whether to generate with vLLM. Quantized rollouts require it.

    Raises:
        ValueError: If settings conflict; the message names them and says what to change.
        ImportError: If `weight_sync="llmcompressor"` and llm-compressor is not installed.
    """

    use_vllm: bool = True

    # Rollout format
    rollout_quantization: dict[str, Any] | str | None = field(
        default="int8",
        metadata={
            "help": (
                f"Format of the actor: {', '.join(SCHEMES)}; {UNQUANTIZED} for no quantization; or "
                f"a JSON object of formats by pattern: {EXAMPLE}."
            )
        },
    )
    quantization_ignore: list[str] = field(default_factory=lambda: ["lm_head"])
    uaq_scale: float = 1.0
    smooth_activations: bool | None = None

    # Weight sync
    weight_sync: str = "auto"
    round_base: bool = False
    rollout_checkpoint_dir: str | None = None
    vllm_request_timeout: float = 900.0
    vllm_engine_kwargs: dict[str, Any] | str | None = field(default_factory=dict)
    rollouts_ahead: int = 0

    # Importance ratio
    importance_cap: float | None = 2.0

    # Checks
    sync_check_interval: int = 16

    # Guard
    mismatch_guard: str = "warn"
    mismatch_guard_kl: float = 0.1

    def __post_init__(self: Any) -> None:
        check_types(self)
        if isinstance(self, GRPOConfig | RLOOConfig):
            # TRL divides by it
            check_number(self, "num_generations", lambda n: n >= 1, "1 or more")
        super().__post_init__()  # type: ignore[misc]  # TRL's config comes after this class
        self.rollout_quantization = read_formats(self.rollout_quantization)
        # in YAML
        self.mismatch_guard = {"False": "off"}.get(str(self.mismatch_guard), self.mismatch_guard)
        if isinstance(self.quantization_ignore, str):  # one pattern, as YAML allows
            self.quantization_ignore = [self.quantization_ignore]
        self._check_values()
        self._check_format()
        self._check_engine()
        if isinstance(self, GRPOConfig | RLOOConfig):
            self._check_groups()
            check_sampling(self, stacklevel=4)
        elif self.rollouts_ahead or self.mismatch_guard == "stop":
            settings = (
                f"rollouts_ahead={self.rollouts_ahead} and mismatch_guard={self.mismatch_guard!r}"
            )
            raise ValueError(
                f"{settings} only work with GRPO and RLOO: leave both out of {type(self).__name__}."
            )

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """`vllm_engine_kwargs` as a dictionary; the command line passes JSON."""
        kwargs = self.vllm_engine_kwargs
        try:
            return {**json.loads(kwargs)} if isinstance(kwargs, str) else dict(kwargs or {})
        except (TypeError, ValueError):
            raise ValueError(
                f"vllm_engine_kwargs is {kwargs!r}: write a JSON dictionary, such as "
                '{"enforce_eager": true}.'
            ) from None

    @property
    def updates_per_rollout(self: Any) -> float:
        """Optimizer updates per rollout: one if TRL's trainer has no settings for it."""
        micro_batches = getattr(self, "steps_per_generation", self.gradient_accumulation_steps)
        return getattr(self, "num_iterations", 1) * micro_batches / self.gradient_accumulation_steps

    def _check_values(self: Any) -> None:
        check_choice(
            self, "weight_sync", ("auto", "stream", "checkpoint", "adapter", "llmcompressor")
        )
        check_choice(self, "vllm_mode", ("colocate", "server"))
        check_choice(self, "mismatch_guard", ("off", "warn", "stop"))
        finite = "positive and finite"
        check_number(
            self,
            "uaq_scale",
            lambda s: 0 < s < inf,
            f"{finite} (the paper uses 1.5; 1.0 turns UAQ off)",
        )
        check_number(
            self,
            "mismatch_guard_kl",
            lambda kl: 0 < kl < inf,
            f"{finite} (nats per token; usually 0.1)",
        )
        check_number(self, "vllm_request_timeout", lambda x: x > 0, "a positive number of seconds")
        check_number(
            self, "sync_check_interval", lambda n: n >= 0, "a number of syncs, or 0 for none"
        )
        check_number(
            self, "temperature", lambda t: 0 < t < inf, f"{finite} (0 makes all completions equal)"
        )
        check_number(self, "max_completion_length", lambda n: n >= 1, "at least 1 token")
        check_number(self, "rollouts_ahead", lambda n: n in (0, 1), "0 or 1")
        share = "a share of the GPU's memory: above 0, at most 1"
        check_number(self, "vllm_gpu_memory_utilization", lambda x: 0 < x <= 1, share)
        check_number(self, "importance_cap", lambda c: c > 0, "a ratio above 0, or None for no cap")
        check_patterns(self.quantization_ignore, "quantization_ignore")

    def _check_groups(self: Any) -> None:
        per_rollout, per_update = (
            self.num_iterations * self.steps_per_generation,
            self.gradient_accumulation_steps,
        )
        if per_rollout % per_update and per_update % per_rollout:
            reason = (
                f"{per_update} does not divide steps_per_generation times num_iterations, "
                f"{per_rollout}"
            )
            warnings.warn(
                f"Updates mix two rollouts: gradient_accumulation_steps={reason}.", stacklevel=5
            )
        if self.sync_ref_model and self.uaq_scale != 1.0:
            raise ValueError(
                f"sync_ref_model=True mixes weights that uaq_scale={self.uaq_scale} rescales into "
                "a model that is not rescaled: set uaq_scale=1.0, or sync_ref_model=False."
            )

    def _check_format(self: Any) -> None:
        if self.round_base and (
            self.weight_sync not in ("auto", "adapter") or self.rollout_quantization is None
        ):
            raise ValueError(
                "round_base=True does not work with "
                f"rollout_quantization={self.rollout_quantization!r} and "
                f"weight_sync={self.weight_sync!r}: choose a format and 'adapter', or set "
                "round_base=False."
            )
        if self.weight_sync == "llmcompressor":
            check_quantizer("llmcompressor", "weight_sync", "auto")
            if self.rollout_quantization is None or self.world_size > 1:
                run = (
                    f"rollout_quantization is {self.rollout_quantization!r} and this run has "
                    f"{self.world_size}"
                )
                raise ValueError(
                    "weight_sync='llmcompressor' needs a format and works in one process, but "
                    f"{run}: use weight_sync='auto', which produces the same codes and scales."
                )
        if self.smooth_activations and (setting := self._smoothing_conflict()):
            raise ValueError(f"smooth_activations=True does not work with {setting}: leave it out.")

    @property
    def smooths(self: Any) -> bool | None:
        """`smooth_activations`, or `None` if the model decides."""
        return self.smooth_activations if self._smoothing_conflict() is None else False

    def _smoothing_conflict(self: Any) -> str | None:
        """Return the setting that rules out smoothing."""
        if not any(scheme.is_smoothed for scheme in schemes_of(self.rollout_quantization)):
            return f"rollout_quantization={self.rollout_quantization!r} (smoothing is for INT8)"
        if self.weight_sync in ("adapter", "llmcompressor"):
            return (
                f"weight_sync={self.weight_sync!r} (smoothing is folded into whole weights as they "
                "are sent)"
            )
        return "round_base=True (no whole weights are sent)" if self.round_base else None

    def _check_engine(self: Any) -> None:
        if self.rollouts_ahead and self.vllm_mode != "server":
            raise ValueError(
                f"rollouts_ahead={self.rollouts_ahead} needs a server that generates meanwhile, "
                f"but vllm_mode is {self.vllm_mode!r}: start one with `trl-qurl serve` and set "
                "vllm_mode='server'."
            )
        if not self.use_vllm:
            raise ValueError(
                "use_vllm=False has no quantized rollouts: set it to True, or use TRL's own "
                "trainer."
            )
        longest = self.vllm_request_timeout + self.vllm_server_timeout
        if self.vllm_mode == "server" and self.world_size > 1 and longest >= self.ddp_timeout:
            wait = f"for {longest:g} seconds (vllm_request_timeout plus vllm_server_timeout)"
            raise ValueError(
                f"The main process may wait for the server {wait}, but the others give up after "
                f"ddp_timeout={self.ddp_timeout}: set it to more."
            )
        if vars(self).get("use_teacher_server") and not hasattr(self, "teacher_model_server_url"):
            raise ValueError(
                "use_teacher_server=True would score the teacher on the quantized actor, because "
                "SDPO and SDFT ask the server that generates: set it to False, so that the trainer "
                "scores the teacher in full precision."
            )
        engine_kwargs = self.engine_kwargs
        if engine_kwargs and self.vllm_mode == "server":
            effect = (
                f"vllm_engine_kwargs {sorted(engine_kwargs)} would have no effect with "
                "vllm_mode='server'"
            )
            raise ValueError(f"{effect}: pass them to `trl-qurl serve` instead.")
        for argument in engine_kwargs.keys() & TAKEN_ENGINE_ARGUMENTS.keys():
            owner = TAKEN_ENGINE_ARGUMENTS[argument]
            raise ValueError(
                f"vllm_engine_kwargs sets {argument!r}, but that is governed by {owner}. Remove it."
            )
        check_engine_arguments(engine_kwargs, "vllm_engine_kwargs")
        check_kv_cache(
            engine_kwargs.get("kv_cache_dtype", "auto"), "kv_cache_dtype of vllm_engine_kwargs"
        )
