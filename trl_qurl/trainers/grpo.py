"""`QuRLGRPOTrainer`: TRL's `GRPOTrainer` with quantized rollouts and the paper's objectives.

From the log-probabilities of the quantized policy that sampled and of the policy being trained, it computes what TRL's
loss reads (`old_per_token_logps` and `importance_sampling_ratio`).

With one update per rollout, the log-probabilities "at rollout time" are those of the update, so no pass computes them
in advance, as TRL does. TRL's loss makes the only forward pass, and reads the objective's inputs after it: they are
added to its batch in between (`_get_per_token_logps_and_entropies`). A subclass with its own loss or forward pass gets
TRL's batch, scored in advance, and so does a model with dropout, which the engine does not have.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from trl_qurl.config import QuRLGRPOConfig
from trl_qurl.importance import importance_ratio
from trl_qurl.objective import TRL_LOSS, SurrogateTerms, get_objective, surrogate_terms
from trl_qurl.rollout.mismatch import valid_logps
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.dynamic_sampling import (
    Batch,
    DynamicSampler,
    PromptStream,
    check_dynamic_sampling,
    weighted_sum,
)
from trl_qurl.trainers.model_card import QURL
from trl_qurl.trainers.rollouts import QuantizedRolloutsMixin


class QuRLGRPOTrainer(QuantizedRolloutsMixin, GRPOTrainer):
    """[`~trl.GRPOTrainer`] with rollouts from a quantized copy of the policy, updated before every generation.

    Training stays in full precision, and the objective (`args.objective`) corrects for the difference. The method and
    its defaults follow QuRL (arXiv 2602.13953).

    Args:
        model: See [`~trl.GRPOTrainer`].
        reward_funcs: See [`~trl.GRPOTrainer`].
        args: A [`QuRLGRPOConfig`] or a [`~trl.GRPOConfig`]; `None` for the defaults.
        positional: Remaining arguments of [`~trl.GRPOTrainer`], in its order (`train_dataset`, `eval_dataset`, ...).
        kwargs: The same arguments by name (`train_dataset`, `peft_config`, ...).

    Raises:
        TypeError: `args` is neither a `QuRLGRPOConfig` nor a `GRPOConfig`, or TRL cannot call a reward function.
        ValueError: The dataset, model or adapter is not supported.
        ImportError: vLLM is not installed.
    """

    vllm_importance_sampling_correction: bool

    _config_class = QuRLGRPOConfig
    _generation_module = grpo_trainer
    _algorithm = "GRPO"
    _tag_names = ["trl", "grpo", "qurl"]
    _name = "QuRL"
    _paper = QURL

    _sampler: DynamicSampler | None = None
    _filled: Batch | None = None  # by dynamic sampling, for the rollout being scored
    _policy_logps: torch.Tensor | None = None  # of the latest forward pass, (B, T)
    _log_ratios: tuple[torch.Tensor, ...] = ()  # log ρ of the rollout's tokens, if the update scores it

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: QuRLGRPOConfig | None = None, *positional: Any, **kwargs: Any
    ) -> None:
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.args.objective != TRL_LOSS:  # for TRL's `sampling/*`, and a subclass's own loss
            self.vllm_importance_sampling_mode, self.vllm_importance_sampling_clip_min = "token_truncate", None
            self.vllm_importance_sampling_clip_max = cap_of(self.args)
        if self.args.dynamic_sampling:
            judge: Callable = functools.partial(weighted_sum, weights=self.reward_weights)
            if self.args.dynamic_sampling_reward is not None:
                index = self.reward_func_names.index(self.args.dynamic_sampling_reward)
                judge = functools.partial(torch.select, dim=1, index=index)
            prompts = PromptStream(self.train_dataset, self.args.seed)
            self._sampler = DynamicSampler(self.num_generations, judge, prompts, self.accelerator)

    def _before_engine(self, args: Any, arguments: dict[str, Any]) -> None:
        super()._before_engine(args, arguments)
        if args.dynamic_sampling:
            check_dynamic_sampling(arguments, args.dynamic_sampling_reward)

    # Rollout ---------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        filled = None
        if self._sampler is not None and self.model.training:
            filled = self._sampler.fill(inputs, self)
            self._record(filled.metrics)
            inputs = [sample.row for sample in filled.samples]
        # TRL would score the rollout in advance, for its importance ratio, even if the update scores it.
        corrects = self.vllm_importance_sampling_correction and not self._scores_in_update
        with substitute(self, "vllm_importance_sampling_correction", corrects), substitute(self, "_filled", filled):
            batch = super()._generate_and_score_completions(inputs)
        if "old_per_token_logps" in batch and "sampling_per_token_logps" in batch:
            self._tally(batch, batch["old_per_token_logps"])
            self._record_mismatch()
        return batch

    def _generate(self, prompts: list) -> tuple:
        if self._filled is not None:
            return self._filled.generated()
        generated = super()._generate(prompts)
        if generated[4] is None and self.args.vllm_importance_sampling_correction:
            raise ValueError(
                "rollout_func returned logprobs=None, but the objective needs them: return a list for each completion "
                "with the log-probability of each token (the third result of trainer.vllm_generation.generate)."
            )
        logps = None if generated[4] is None else valid_logps(generated[4])
        return (*generated[:4], logps, *generated[5:])

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._calculate_rewards(*args, **kwargs) if self._filled is None else self._filled.rewards

    # Loss ------------------------------------------------------------------------------------------------------------

    @property
    def _scores_in_update(self) -> bool:
        """True if the loss computes `proximal_logps`: every token is trained on before the policy changes."""
        methods = "_compute_loss", "_get_per_token_logps_and_entropies"
        is_ours = all(getattr(type(self), name) is getattr(QuRLGRPOTrainer, name) for name in methods)
        if self.args.objective == TRL_LOSS or not is_ours or self.args.neftune_noise_alpha or has_dropout(self.model):
            return False
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        inputs = dict(inputs)
        proximal_logps, is_scored = inputs.get("old_per_token_logps"), "old_per_token_logps" in inputs
        if is_scored:
            inputs |= self._objective_inputs(inputs, proximal_logps)
        with substitute(self, "_unscored", None if is_scored else inputs):
            loss = super()._compute_loss(model, inputs)
        policy_logps, learned = self._policy_logps, learned_tokens(inputs)
        if policy_logps is None:  # a subclass scores without our forward pass
            return loss
        if not is_scored and "sampling_per_token_logps" in inputs:
            proximal_logps = policy_logps
            self._tally(inputs, proximal_logps)
            self._log_ratios += ((proximal_logps - inputs["sampling_per_token_logps"])[learned],)
            # The rollout's last micro-batch (TRL increments `_step` after the loss); in evaluation, each one is.
            if self._mode == "eval" or (self._step + 1) % self.args.steps_per_generation == 0:
                self._record_mismatch()
                log_ratios, self._log_ratios = torch.cat(self._log_ratios), ()
                if self.vllm_importance_sampling_correction:
                    self._record(sampling_metrics(log_ratios, self.args, self.accelerator.gather))
        if proximal_logps is not None:
            lifts = self.args.objective != TRL_LOSS and get_objective(self.args.objective).lifts_upper_bound
            lifting = (cap_of(self.args), 1 + self.epsilon_high) if lifts else None
            logps = policy_logps, proximal_logps
            self._record(loss_metrics(*logps, inputs, learned, self._sum_over_processes, lifting))
        return loss

    def _tally(self, batch: dict[str, Any], proximal_logps: torch.Tensor) -> None:
        logps = proximal_logps, batch["sampling_per_token_logps"]
        self._mismatch.add(*logps, learned_tokens(batch), cap_of(self.args))

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._policy_logps = result[0].detach()
        if self._unscored is not None:  # TRL's loss reads what this adds only after its forward pass
            self._unscored |= self._objective_inputs(self._unscored, self._policy_logps)
        return result

    def _objective_inputs(self, batch: dict[str, Any], proximal_logps: Any) -> dict[str, torch.Tensor]:
        """Return the inputs, (B, T) each, from which TRL's loss computes the objective."""
        if self.args.objective == TRL_LOSS:
            return {}
        terms = objective_terms(self.args, batch, proximal_logps, batch["sampling_per_token_logps"])
        return {"old_per_token_logps": terms.old_logps, "importance_sampling_ratio": terms.weight}

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _rollout_state(self) -> dict[str, Any]:
        return super()._rollout_state() | {"prompts_drawn": self._sampler and self._sampler.prompts.drawn}

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        if self._sampler is not None and state["prompts_drawn"] is not None:
            self._sampler.prompts.drawn = state["prompts_drawn"]


def learned_tokens(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mask the completion tokens that the model generated and learns from, bool (B, T): no padding or tool output."""
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    return mask.bool()


def cap_of(args: Any) -> float:
    """Return the cap C of a config, a ratio; infinite for `None`."""
    return math.inf if args.importance_cap is None else args.importance_cap


def has_dropout(model: Any) -> bool:
    """Return whether a model in train mode computes with dropout, or a router with noise."""
    config = model.config.get_text_config().to_dict()
    names = [name for name in config if ("drop" in name or "jitter" in name) and not name.startswith("classifier")]
    is_set = any(config[name] for name in names)
    return is_set or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def objective_terms(
    args: Any, batch: Mapping[str, torch.Tensor], proximal_logps: torch.Tensor, behavior_logps: torch.Tensor
) -> SurrogateTerms:
    """Return the terms of a config's objective for a batch, (B, T) each."""
    # Masked tokens have no ratio: mark them with NaN, which also keeps their padding out of exp().
    behavior_logps = behavior_logps.masked_fill(~learned_tokens(batch), torch.nan)
    return surrogate_terms(args.objective, proximal_logps, behavior_logps, batch["advantages"], cap=cap_of(args))


def sampling_metrics(
    log_ratio: torch.Tensor, args: Any, gather: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, float]:
    """Return TRL's `sampling/*` from log ρ, (tokens,): TRL computes them only for a rollout scored in advance."""
    ratio = log_ratio.nan_to_num(0.0).exp().clamp(max=cap_of(args))
    metrics: dict[str, float] = {}
    for name, part in {"sampling_logp_difference": log_ratio.abs(), "importance_sampling_ratio": ratio}.items():
        known = part[~part.isnan()] if part.isfinite().any() else part.new_zeros(1)
        each = gather(torch.stack([known.mean(), known.max(), known.min()]).unsqueeze(0))  # (processes, 3)
        metrics |= {f"sampling/{name}/mean": each[:, 0].mean().item(), f"sampling/{name}/max": each[:, 1].max().item()}
    return metrics | {"sampling/importance_sampling_ratio/min": each[:, 2].min().item()}


def loss_metrics(
    policy_logps: torch.Tensor,  # of the policy being updated, (B, T)
    proximal_logps: torch.Tensor,  # of the policy at rollout time, (B, T)
    inputs: Mapping[str, torch.Tensor],  # of the loss
    learned: torch.Tensor,  # mask of the tokens learned from, bool (B, T)
    sum_over_processes: Callable[[torch.Tensor], torch.Tensor],
    lifting: tuple[float, float] | None = None,  # with ACR: the cap C, and the bound 1 + ε_high that it lifts
) -> dict[str, float]:
    """Return metrics of an update on B sequences of T completion tokens.

    `policy/approx_kl` estimates KL(π_prox ‖ π_θ) in nats per token by k3, R − 1 − log R with R = π_θ/π_prox (Schulman
    2020, "Approximating KL Divergence"). `acr/*` are shares of all tokens learned from: those whose upper bound ACR
    lifted, and the subset of these that TIS would have clipped.
    """
    log_ratio = (policy_logps - proximal_logps).masked_fill(~learned, 0.0).double()  # (B, T)
    parts = {"policy/approx_kl": log_ratio.expm1() - log_ratio}  # (B, T) each
    if lifting is not None:
        cap, bound = lifting
        advantages = inputs["advantages"].reshape(len(learned), -1)  # (B, T) or (B, 1)
        lifted = learned & (importance_ratio(proximal_logps, inputs["sampling_per_token_logps"]) > cap)  # (B, T)
        is_clipped = torch.exp(policy_logps - inputs["old_per_token_logps"]) > bound  # (B, T)
        let_through = lifted & (advantages > 0) & (log_ratio.exp() > bound) & ~is_clipped
        parts |= {"acr/lifted_share": lifted, "acr/let_through_share": let_through}
    sums = torch.stack([part.sum().float() for part in (learned, *parts.values())])
    count, *totals = sum_over_processes(sums).tolist()
    return {name: total / max(count, 1.0) for name, total in zip(parts, totals, strict=True)}
