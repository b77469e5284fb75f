"""Settings of quantized rollouts, for the config of any TRL trainer that generates with vLLM."""

import inspect
import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from trl import GRPOConfig, RLOOConfig

from trl_qurl.config.checks.conflicts import CONFLICTS, check_conflicts
from trl_qurl.config.checks.engine_arguments import read_engine_kwargs
from trl_qurl.config.checks.names import explain
from trl_qurl.config.checks.sampling import check_sampling
from trl_qurl.config.checks.values import COUNT, POSITIVE, check_values
from trl_qurl.config.help import with_help
from trl_qurl.quantization.checks.kv_cache import check_kv_cache
from trl_qurl.quantization.checks.plan import check_patterns
from trl_qurl.quantization.formats import EXAMPLE, SCHEMES, UNQUANTIZED, emulates_bfloat16
from trl_qurl.quantization.plan import read_formats, schemes_of


@with_help
@dataclass
class QuantizedRolloutsConfig:
    """Mixin for TRL configs: the settings of quantized rollouts.

    On a GPU before Ampere, such as a T4, training uses float16 (`fp16`) in place of TRL's default,
    bfloat16, unless `bf16` is set.

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
        smooth_activations: Whether to shrink large activations before the engine rounds them, as
            SmoothQuant does; on by default if the format is INT8, the model's architecture is
            supported, and whole weights are sent. The columns that read them are enlarged; the
            policy's own weights do not change.

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
            ends training. In YAML, write `"off"` with quotes.
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
    uaq_scale: Annotated[float, POSITIVE] = 1.0
    smooth_activations: bool | None = None

    # Weight sync
    weight_sync: Literal["auto", "stream", "checkpoint", "adapter", "llmcompressor"] = "auto"
    round_base: bool = False
    rollout_checkpoint_dir: str | None = None
    vllm_request_timeout: Annotated[float, POSITIVE] = 900.0
    vllm_engine_kwargs: dict[str, Any] | str | None = field(default_factory=dict)

    # Importance ratio
    importance_cap: Annotated[float | None, POSITIVE] = 2.0

    # Checks
    sync_check_interval: Annotated[int, COUNT] = 16

    # Guard
    mismatch_guard: Literal["off", "warn", "stop"] = "warn"
    mismatch_guard_kl: Annotated[float, POSITIVE] = 0.1

    def __new__(cls, *positional: Any, **settings: Any) -> Any:
        """Raise `TypeError` for all unknown names at once, with what to do about each."""
        # A subclass may have its own constructor.
        known = {*cls.__dataclass_fields__, *inspect.signature(cls.__init__).parameters}
        unknown = [name for name in settings if name not in known]
        if unknown:
            explained = explain(unknown, known)
            raise TypeError(f"{cls.__name__}() got unexpected keyword arguments:\n{explained}")
        return super().__new__(cls)

    def __post_init__(self: Any) -> None:
        if self.bf16 is None and not self.use_cpu and emulates_bfloat16():
            self.fp16 = True
        super().__post_init__()  # type: ignore[misc]  # TRL's config comes after this class
        self.rollout_quantization = read_formats(self.rollout_quantization)
        check_patterns(self.quantization_ignore, "quantization_ignore")
        self.vllm_engine_kwargs = read_engine_kwargs(self.vllm_engine_kwargs)
        cache = self.vllm_engine_kwargs.get("kv_cache_dtype", "auto")
        check_kv_cache(cache, "kv_cache_dtype of vllm_engine_kwargs")
        if self.rollout_checkpoint_dir is not None:  # as transformers does with output_dir
            self.rollout_checkpoint_dir = os.path.expanduser(self.rollout_checkpoint_dir)
        check_values(self)
        check_conflicts(self, CONFLICTS)
        if isinstance(self, GRPOConfig | RLOOConfig):
            check_sampling(self, stacklevel=4)

    @property
    def updates_per_rollout(self: Any) -> float:
        """Optimizer updates per rollout: one if TRL's trainer has no settings for it."""
        per_update = self.gradient_accumulation_steps
        per_rollout = getattr(self, "steps_per_generation", per_update)
        return getattr(self, "num_iterations", 1) * per_rollout / per_update

    @property
    def smooths(self) -> bool | None:
        """`smooth_activations`, or `None` if the model decides."""
        sends_adapter = self.weight_sync == "adapter" or self.round_base
        schemes = schemes_of(self.rollout_quantization)
        if sends_adapter or not any(scheme.is_smoothed for scheme in schemes):
            return False
        return self.smooth_activations
