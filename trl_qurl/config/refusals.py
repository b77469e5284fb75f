"""What the configurations refuse, as tables; `checks` reads them.

A refusal names what was given, says why it cannot work, and names the way out.
"""

from collections.abc import Callable
from importlib.util import find_spec
from math import inf
from typing import Any, NamedTuple

from trl import GRPOConfig

from trl_qurl.quantization.plan import schemes_of


class Number(NamedTuple):
    """What a number must be; `None` passes."""

    is_allowed: Callable[[Any], bool]
    requirement: str  # the same in words


class Conflict(NamedTuple):
    """Settings of a configuration that cannot work as they are."""

    settings: tuple[str, ...]  # named in the message, with their values
    occurs: Callable[[Any], bool]  # whether a configuration has the conflict
    reason: str
    way_out: str

    def given(self, config: Any) -> str:
        """Return the settings with their values."""
        return " and ".join(f"{name}={getattr(config, name)!r}" for name in self.settings)


# Values of one setting
# --------------------------------------------------------------------------------------------------

CHOICES = {
    "weight_sync": ("auto", "stream", "checkpoint", "adapter", "llmcompressor"),
    "vllm_mode": ("colocate", "server"),
    "mismatch_guard": ("off", "warn", "stop"),
}

NUMBERS = {
    "uaq_scale": Number(
        lambda scale: 0 < scale < inf,
        "positive and finite (the paper uses 1.5; 1.0 turns UAQ off)",
    ),
    "mismatch_guard_kl": Number(
        lambda kl: 0 < kl < inf, "positive and finite (nats per token; usually 0.1)"
    ),
    "vllm_request_timeout": Number(lambda seconds: seconds > 0, "a positive number of seconds"),
    "sync_check_interval": Number(lambda syncs: syncs >= 0, "a number of syncs, or 0 for none"),
    "temperature": Number(
        lambda temperature: 0.01 <= temperature < inf,
        "at least 0.01, to which vLLM raises lower ones (0 makes all completions equal)",
    ),
    "max_completion_length": Number(lambda tokens: tokens >= 1, "at least 1 token"),
    "vllm_gpu_memory_utilization": Number(
        lambda share: 0 < share <= 1, "a share of the GPU's memory: above 0, at most 1"
    ),
    "importance_cap": Number(lambda cap: cap > 0, "a ratio above 0, or None for no cap"),
}

GROUP_NUMBERS = {
    "num_generations": Number(lambda number: number >= 1, "1 or more"),
    "top_p": Number(lambda share: 0 < share <= 1, "a share above 0, at most 1 (1 cuts nothing)"),
    "top_k": Number(
        lambda tokens: tokens >= -1 and tokens != 1,
        "two tokens or more, or 0 for all (1 makes all completions equal)",
    ),
    "min_p": Number(lambda share: 0 <= share <= 1, "in [0, 1] (0 cuts nothing)"),
    "repetition_penalty": Number(lambda factor: 0 < factor < inf, "positive (1 changes nothing)"),
}
"""Checked before TRL divides by them, or vLLM has started."""

CRITIC_NUMBERS = {
    "gamma": Number(lambda gamma: 0 <= gamma <= 1, "in [0, 1] (verl's setting is 1)"),
    "gae_lambda": Number(lambda weight: 0 <= weight <= 1, "in [0, 1] (verl's setting is 1)"),
    "critic_learning_rate": Number(lambda rate: 0 < rate < inf, "positive and finite"),
    "critic_warmup_steps": Number(
        lambda steps: steps >= 0, "a number of optimizer steps, or 0 for none"
    ),
    "value_clip_range": Number(lambda distance: distance > 0, "positive, or None for no clipping"),
}

# Settings that conflict
# --------------------------------------------------------------------------------------------------

CONFLICTS = (
    Conflict(
        ("use_vllm",),
        lambda config: not config.use_vllm,
        "only vLLM generates with quantized weights",
        "Set it to True, or use TRL's own trainer",
    ),
    Conflict(
        ("round_base", "rollout_quantization", "weight_sync"),
        lambda config: (
            config.round_base
            and (
                config.rollout_quantization is None or config.weight_sync not in ("auto", "adapter")
            )
        ),
        "only the adapter is sent, to an engine with a quantized base",
        "Choose a format and weight_sync='adapter', or set round_base=False",
    ),
    Conflict(
        ("max_completion_length", "vllm_max_model_length"),
        lambda config: (
            config.vllm_mode == "colocate"
            and (config.max_completion_length or 0) >= (config.vllm_max_model_length or inf)
        ),
        "completions leave no room for prompts",
        "Allow shorter completions, or a longer context",
    ),
    Conflict(
        ("rollout_checkpoint_dir",),
        lambda config: (config.rollout_checkpoint_dir or "").startswith("~"),
        "'~' stands for your home directory only in a shell, unquoted",
        "Write the path out",
    ),
    Conflict(
        ("weight_sync", "rollout_quantization"),
        lambda config: (
            config.weight_sync == "llmcompressor" and config.rollout_quantization is None
        ),
        "llm-compressor needs a format",
        "Choose one, or use weight_sync='auto'",
    ),
    Conflict(
        ("weight_sync",),
        lambda config: config.weight_sync == "llmcompressor" and find_spec("llmcompressor") is None,
        "llm-compressor is not installed",
        "Run `pip install 'trl-qurl[llmcompressor]'`, or use 'auto', which sends the same codes",
    ),
    Conflict(
        ("vllm_request_timeout", "vllm_server_timeout", "ddp_timeout"),
        lambda config: (
            config.vllm_mode == "server"
            and config.world_size > 1
            and config.vllm_request_timeout + config.vllm_server_timeout >= config.ddp_timeout
        ),
        "the main process may wait for the server for the first two together, but the others give "
        "up after ddp_timeout seconds",
        "Set ddp_timeout to more",
    ),
    Conflict(
        ("use_teacher_server",),
        lambda config: (
            vars(config).get("use_teacher_server")
            and not hasattr(config, "teacher_model_server_url")
        ),
        "SDPO and SDFT ask the server that generates, so the teacher would be the quantized actor",
        "Set use_teacher_server=False, so the trainer scores the teacher in full precision",
    ),
    Conflict(
        ("vllm_engine_kwargs", "vllm_mode"),
        lambda config: config.engine_kwargs and config.vllm_mode == "server",
        "a server is started with its own arguments",
        "Pass them to `trl-qurl serve`",
    ),
)
"""With any trainer."""

SMOOTHING_CONFLICTS = (
    Conflict(
        ("smooth_activations", "rollout_quantization"),
        lambda config: (
            not any(scheme.is_smoothed for scheme in schemes_of(config.rollout_quantization))
        ),
        "smoothing is for INT8",
        "Leave smooth_activations out",
    ),
    Conflict(
        ("smooth_activations", "weight_sync"),
        lambda config: config.weight_sync == "adapter",
        "smoothing is folded into whole weights as they are sent",
        "Leave smooth_activations out",
    ),
    Conflict(
        ("smooth_activations", "round_base"),
        lambda config: config.round_base,
        "smoothing is folded into whole weights, which are not sent",
        "Leave smooth_activations out",
    ),
)
"""What rules out smoothing."""

GROUP_CONFLICTS = (
    Conflict(
        ("sync_ref_model", "uaq_scale"),
        lambda config: config.sync_ref_model and config.uaq_scale != 1.0,
        "weights that uaq_scale rescales would be mixed into a model that is not rescaled",
        "Set uaq_scale=1.0, or sync_ref_model=False",
    ),
)
"""With GRPO and RLOO."""

GRPO_CONFLICTS = (
    Conflict(
        ("dynamic_sampling_reward", "dynamic_sampling"),
        lambda config: config.dynamic_sampling_reward is not None and not config.dynamic_sampling,
        "the reward only decides which groups dynamic sampling replaces",
        "Set dynamic_sampling=True, or leave dynamic_sampling_reward out",
    ),
)

# Settings of TRL's loss that an objective does not fit
# --------------------------------------------------------------------------------------------------

CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""TRL's losses that clamp the ratio on both sides and average over tokens, from which ACR can be
made."""

UNCORRECTED = Conflict(
    ("vllm_importance_sampling_correction",),
    lambda config: not config.vllm_importance_sampling_correction,
    "it turns off the correction that the objective is",
    "Leave it True ('naive' has no correction)",
)
"""With all objectives but TRL's."""

LIFTED_BOUND = (
    Conflict(
        ("importance_sampling_level",),
        lambda config: config.importance_sampling_level != "token",
        "the clip bounds of single tokens are lifted",
        "Use 'token'",
    ),
    Conflict(
        ("loss_type",),
        lambda config: config.loss_type not in CLIPPED_LOSS_TYPES,
        "the loss must clip the ratio of a token on both sides",
        f"Use one of {', '.join(map(repr, CLIPPED_LOSS_TYPES))}",
    ),
    Conflict(
        ("use_bias_correction_kl", "beta"),
        lambda config: config.use_bias_correction_kl and config.beta != 0.0,
        "TRL weights the penalty by the ratio, which the objective changes",
        "Set use_bias_correction_kl=False",
    ),
    Conflict(
        ("delta",),
        lambda config: config.delta is not None,
        "it bounds the ratio, which the objective changes",
        "Set delta=None",
    ),
)
"""With objectives that lift the upper clip bound."""


def _is_changed(name: str) -> Callable[[Any], bool]:
    """Return a function that says whether a setting of TRL's correction is not the default.

    Our objectives cut the ratio of each token, as TRL does with "token_truncate", which VESPO
    requires.
    """
    default = getattr(GRPOConfig, name)
    return lambda config: getattr(config, name) not in (default, "token_truncate")


def _unread(setting: str, way_out: str) -> Conflict:
    name = f"vllm_importance_sampling_{setting}"
    return Conflict((name,), _is_changed(name), "only TRL's own correction reads it", way_out)


LARGEST_WEIGHT = _unread("clip_max", "Set importance_cap")
TRLS_CORRECTION = (
    _unread("clip_min", "Leave it out, or use objective='trl'"),
    _unread("mode", "Leave it out, or use objective='trl'"),
)
"""Settings that only `objective="trl"` reads."""

WITH_A_CRITIC = {
    "loss_type": CLIPPED_LOSS_TYPES,  # those with one ratio per token, clipped on both sides
    "importance_sampling_level": ("token",),
    "dynamic_sampling": (False,),  # compares completions of a group, as do the next two
    "scale_rewards": ("none", False),
    "multi_objective_aggregation": ("sum_then_normalize",),
}
"""Values of settings that fit advantages of a critic."""

# Parameters of vLLM
# --------------------------------------------------------------------------------------------------

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

DISTRIBUTION = (
    "it changes the distribution that tokens are sampled from, and the trainer computes another one"
)
DRAFTS = (
    "no sync updates a draft model, and the log-probabilities of its tokens were never compared "
    "with the trainer's"
)
ENDS = (
    "the trainer's settings decide how tokens are sampled, and "
    "model.generation_config.eos_token_id where they end"
)
UNFOLLOWED = {
    "logits_processors": DISTRIBUTION,
    "logits_processor_pattern": DISTRIBUTION,
    "watermark_config": DISTRIBUTION,
    "diffusion_config": DISTRIBUTION,
    "speculative_config": DRAFTS,
    "spec_method": DRAFTS,
    "spec_model": DRAFTS,
    "spec_tokens": DRAFTS,
    "generation_config": ENDS,
    "override_generation_config": ENDS,
    "skip_tokenizer_init": "the engine would not know the token that ends a completion",
}
"""Arguments of an engine that make it sample what the trainer cannot score, and why."""

OTHER_TOKENS = "TRL would read another token's log-probability than the sampled one's"
SAMPLING_PARAMETERS = {
    "n": "num_generations is the number of completions per prompt",
    "seed": (
        "all completions of a colocated group would be the same, and the engine follows the seed "
        "setting"
    ),
    "logprobs": OTHER_TOKENS,
    "logprob_token_ids": OTHER_TOKENS,
}
"""Parameters that `generation_kwargs` must not set, and why."""
