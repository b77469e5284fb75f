"""`QuRLGRPOTrainer`: TRL's `GRPOTrainer` with quantized rollouts and the paper's objectives.

`QuantizedRolloutsMixin` provides the rollouts. This file corrects for the mismatch between the quantized policy that
sampled and the full-precision policy being trained. It computes the objective's inputs once per rollout and adds them
to the batch, where TRL's loss reads them (`old_per_token_logps`, `importance_sampling_ratio`, clip bounds per token).

With `objective="trl"`, TRL's loss and correction stay unchanged, and the mismatch is only measured.

With one update per rollout, the log-probabilities "at rollout time" are those of the update. No pass computes them in
advance: the inputs are completed inside TRL's loss, after its forward pass (except with `"trl"`).
"""

from typing import Any

import torch
from trl.trainer import grpo_trainer

from trl_qurl.config import QuRLGRPOConfig
from trl_qurl.objective import TRL_LOSS, get_objective, surrogate_terms
from trl_qurl.rollout.mismatch import valid_logps
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.dynamic_sampling.trainer import DynamicSamplingTrainer
from trl_qurl.trainers.loss_metrics import loss_metrics
from trl_qurl.trainers.model_card import QURL, describe_objective
from trl_qurl.trainers.rollouts import QuantizedRolloutsMixin


class QuRLGRPOTrainer(QuantizedRolloutsMixin, DynamicSamplingTrainer):
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

    Example:

    ```python
    from datasets import load_dataset
    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

    trainer = QuRLGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=lambda completions, **kwargs: [float(len(set(completion))) for completion in completions],
        args=QuRLGRPOConfig("output", steps_per_generation=16, gradient_accumulation_steps=4),
        train_dataset=load_dataset("trl-lib/tldr", split="train"),
    )
    trainer.train()
    ```
    """

    epsilon_low: Any
    epsilon_high: Any
    vllm_importance_sampling_correction: bool

    _config_class = QuRLGRPOConfig
    _generation_module = grpo_trainer
    _algorithm = "GRPO"
    _algorithm_citation = """@article{shao2024deepseekmath,
    title        = {{DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models}},
    author       = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and Mingchuan Zhang and \
Y. K. Li and Y. Wu and Daya Guo},
    year         = 2024,
    eprint       = {arXiv:2402.03300},
}"""
    _tag_names = ["trl", "grpo", "qurl"]
    _name = "QuRL"
    _paper = QURL

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: QuRLGRPOConfig | None = None,
        *positional: Any,
        **kwargs: Any,
    ) -> None:
        self._policy_logps: torch.Tensor | None = None  # of the latest forward pass, (B, T)
        self._unscored_inputs: dict[str, Any] | None = None  # loss inputs still waiting for their objective terms
        super().__init__(model, reward_funcs, args, *positional, **kwargs)

    # Rollout ---------------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list) -> tuple:
        generated = super()._generate(prompts)
        if generated[4] is None and self.vllm_importance_sampling_correction:
            raise ValueError(
                "rollout_func returned logprobs=None, but the objective needs them: return a list for each completion "
                "with the log-probability of each token (the third result of trainer.vllm_generation.generate)."
            )
        logps = None if generated[4] is None else valid_logps(generated[4])
        return (*generated[:4], logps, *generated[5:])

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        # TRL would score the rollout in advance, for the importance ratio. If the update scores it, the loss computes
        # the ratio instead.
        corrects = self.vllm_importance_sampling_correction and not self._scores_in_update
        with substitute(self, "vllm_importance_sampling_correction", corrects):
            batch = super()._generate_and_score_completions(inputs)
        if "old_per_token_logps" in batch:
            batch |= self._objective_inputs(batch, batch["old_per_token_logps"])
        if "proximal_logps" in batch and "sampling_per_token_logps" in batch:
            self._record_mismatch()
        return batch

    @property
    def _uses_trls_loss(self) -> bool:
        return self.args.objective == TRL_LOSS

    @property
    def _scores_in_update(self) -> bool:
        """True if every token of a rollout is trained on before the policy changes."""
        if self._uses_trls_loss:
            return False
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    def _objective_inputs(self, batch: dict[str, Any], proximal_logps: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the inputs, (B, T) each, from which TRL's loss computes the objective, and tally the mismatch."""
        learned = learned_tokens(batch)
        behavior_logps = batch.get("sampling_per_token_logps")
        cap = self.vllm_importance_sampling_clip_max
        cap = float("inf") if cap is None else cap
        if behavior_logps is not None:
            self._mismatch.add(proximal_logps, behavior_logps, learned, cap)
        if self._uses_trls_loss:
            return {"proximal_logps": proximal_logps}
        if behavior_logps is None:
            raise ValueError(
                f"objective={self.args.objective!r} needs the engine's log-probabilities, but the batch has no "
                "'sampling_per_token_logps', (B, T): keep every key that _generate_and_score_completions returns, or "
                "set objective='trl'."
            )
        # Masked tokens have no ratio: mark them with NaN, which also keeps their padding out of exp().
        behavior_logps = behavior_logps.masked_fill(~learned, torch.nan)
        terms = surrogate_terms(
            self.args.objective,
            proximal_logps,
            behavior_logps,
            cap=cap,
            floor=self.vllm_importance_sampling_clip_min,
            epsilon_low=float(self.epsilon_low),
            epsilon_high=float(self.epsilon_high),
        )
        inputs = {
            "old_per_token_logps": terms.old_logps,
            "importance_sampling_ratio": terms.weight,
            "proximal_logps": proximal_logps,
        }
        if get_objective(self.args.objective).lifts_upper_bound:  # TRL's scalar bounds also fit ratios of sequences
            inputs |= {"epsilon_low": terms.epsilon_low, "epsilon_high": terms.epsilon_high}
        return inputs

    # Loss ------------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        is_complete = self._uses_trls_loss or "proximal_logps" in inputs
        inputs = dict(inputs)
        is_scored = is_complete or "old_per_token_logps" in inputs
        if is_scored and not is_complete:  # TRL's batch, not from our `_generate_and_score_completions`
            inputs |= self._objective_inputs(inputs, inputs["old_per_token_logps"])
        with (
            substitute(self, "epsilon_low", inputs.get("epsilon_low", self.epsilon_low)),
            substitute(self, "epsilon_high", inputs.get("epsilon_high", self.epsilon_high)),
            substitute(self, "_unscored_inputs", None if is_scored else inputs),
        ):
            loss = super()._compute_loss(model, inputs)
        assert self._policy_logps is not None  # the loss runs one forward pass
        if "proximal_logps" in inputs:
            learned, epsilon_high = learned_tokens(inputs), float(self.epsilon_high)
            self._record(loss_metrics(self._policy_logps, inputs, learned, epsilon_high, self._sum_over_processes))
        # The rollout's last micro-batch (TRL increments `_step` after the loss); in evaluation, each one is.
        is_last = self._mode == "eval" or (self._step + 1) % self.args.steps_per_generation == 0
        if is_last and not is_complete:
            self._record_mismatch()
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._policy_logps = result[0].detach()
        if self._unscored_inputs is not None:
            # TRL's loss reads all of these only after its forward pass.
            self._unscored_inputs |= self._objective_inputs(self._unscored_inputs, self._policy_logps)
            self.epsilon_low = self._unscored_inputs.get("epsilon_low", self.epsilon_low)
            self.epsilon_high = self._unscored_inputs.get("epsilon_high", self.epsilon_high)
        return result

    # Model card ------------------------------------------------------------------------------------------------------

    def _describe_run(self) -> tuple[list[str], dict[str, object]]:
        sentences, settings = super()._describe_run()
        args = self.args
        upper = args.epsilon if args.epsilon_high is None else args.epsilon_high
        settings |= {
            "`objective`": args.objective,
            "cap C (`vllm_importance_sampling_clip_max`)": args.vllm_importance_sampling_clip_max,
            "`epsilon`, `epsilon_high`": f"{args.epsilon}, {upper}",
            "`loss_type`": args.loss_type,
        }
        if self._uses_trls_loss:
            sentence = f"The loss and its correction are TRL's own (`{args.vllm_importance_sampling_mode}`)."
        else:
            sentence = describe_objective(args.objective)
        return [*sentences, sentence], settings


def learned_tokens(inputs: dict[str, Any]) -> torch.Tensor:
    """Mask the completion tokens that the model generated and learns from, bool (B, T): no padding or tool output."""
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    return mask.bool()
