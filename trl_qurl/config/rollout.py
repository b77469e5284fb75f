"""Settings of quantized rollouts, for the config of any TRL trainer that generates with vLLM."""

import json
import warnings
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig, RLOOConfig

from trl_qurl.config.checks import (
    check_choice,
    check_conflicts,
    check_engine_arguments,
    check_numbers,
    check_sampling,
    check_types,
)
from trl_qurl.config.help import with_help
from trl_qurl.config.refusals import (
    CHOICES,
    CONFLICTS,
    GROUP_CONFLICTS,
    GROUP_NUMBERS,
    NUMBERS,
    SMOOTHING_CONFLICTS,
    TAKEN_ENGINE_ARGUMENTS,
)
from trl_qurl.quantization.checks.kv_cache import check_kv_cache
from trl_qurl.quantization.checks.plan import check_patterns
from trl_qurl.quantization.formats import EXAMPLE, SCHEMES, UNQUANTIZED
from trl_qurl.quantization.plan import read_formats


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
            server that accepts adapters. Otherwise it streams in process, and to a server over NCCL
            (never run on a GPU yet) if both sides have CUDA and each training process holds the
            whole policy; else, as under FSDP and ZeRO-3, it writes checkpoints. It logs why.
            `llmcompressor` is the slow reference: at each sync, one process has llm-compressor
            round the same weights and write a checkpoint.
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

    > Importance ratio

        importance_cap: Cap C of the importance ratio ρ of a token (a ratio, not a log), which `acr`
            and `tis` limit. `None` (on the command line, `inf`) is no cap. FlashRL uses 2, and the
            paper gives no value. `mismatch/capped_share` counts the tokens above it, whatever the
            objective.

    > Checks

        sync_check_interval: Syncs between checks that the engine computes the policy's function, by
            the tokens of the next rollout; 0 for none. With 0 there are no digests either, which
            compare each tensor that travels as a file or to a server with what arrived. Otherwise
            always after the first sync, and over NCCL.

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
            check_numbers(self, GROUP_NUMBERS)
        super().__post_init__()  # type: ignore[misc]  # TRL's config comes after this class
        self.rollout_quantization = read_formats(self.rollout_quantization)
        if str(self.mismatch_guard) == "False":  # what YAML reads for `off`
            self.mismatch_guard = "off"
        if isinstance(self.quantization_ignore, str):  # one pattern, as YAML allows
            self.quantization_ignore = [self.quantization_ignore]
        for name, choices in CHOICES.items():
            check_choice(self, name, choices)
        check_numbers(self, NUMBERS)
        check_patterns(self.quantization_ignore, "quantization_ignore")
        check_conflicts(self, CONFLICTS)
        if self.smooth_activations:
            check_conflicts(self, SMOOTHING_CONFLICTS)
        self._check_engine_arguments()
        if isinstance(self, GRPOConfig | RLOOConfig):
            check_conflicts(self, GROUP_CONFLICTS)
            self._warn_of_mixed_updates()
            check_sampling(self, stacklevel=4)

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """`vllm_engine_kwargs` as a dictionary; the command line passes JSON."""
        kwargs = self.vllm_engine_kwargs or {}
        try:
            return dict(json.loads(kwargs) if isinstance(kwargs, str) else kwargs)
        except (TypeError, ValueError):
            raise ValueError(
                f"vllm_engine_kwargs is {kwargs!r}: write a JSON dictionary, such as "
                '{"enforce_eager": true}.'
            ) from None

    @property
    def updates_per_rollout(self: Any) -> float:
        """Optimizer updates per rollout: one if TRL's trainer has no settings for it."""
        per_update = self.gradient_accumulation_steps
        per_rollout = getattr(self, "steps_per_generation", per_update)
        return getattr(self, "num_iterations", 1) * per_rollout / per_update

    @property
    def smooths(self: Any) -> bool | None:
        """`smooth_activations`, or `None` if the model decides."""
        if any(conflict.occurs(self) for conflict in SMOOTHING_CONFLICTS):
            return False
        return self.smooth_activations

    def _check_engine_arguments(self: Any) -> None:
        """Raise `ValueError` for arguments of the engine that something else governs, or breaks."""
        engine_kwargs = self.engine_kwargs
        for argument in engine_kwargs:
            if argument in TAKEN_ENGINE_ARGUMENTS:
                raise ValueError(
                    f"vllm_engine_kwargs sets {argument!r}, but that is governed by "
                    f"{TAKEN_ENGINE_ARGUMENTS[argument]}. Remove it."
                )
        check_engine_arguments(engine_kwargs, "vllm_engine_kwargs")
        cache = engine_kwargs.get("kv_cache_dtype", "auto")
        check_kv_cache(cache, "kv_cache_dtype of vllm_engine_kwargs")

    def _warn_of_mixed_updates(self: Any) -> None:
        per_rollout = self.num_iterations * self.steps_per_generation
        per_update = self.gradient_accumulation_steps
        if per_rollout % per_update and per_update % per_rollout:
            warnings.warn(
                f"Updates mix two rollouts: gradient_accumulation_steps={per_update} does not "
                f"divide steps_per_generation times num_iterations, {per_rollout}.",
                stacklevel=5,
            )
