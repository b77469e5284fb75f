"""`QuRLGRPOTrainer`: TRL's `GRPOTrainer` with quantized rollouts and the paper's objectives.

From the log-probabilities of the quantized policy that sampled and of the policy being trained, it computes what TRL's
loss reads (`old_per_token_logps` and `importance_sampling_ratio`).

With one update per rollout, the log-probabilities "at rollout time" are those of the update, so no pass computes them
in advance, as TRL does. TRL's loss makes the only forward pass, and reads the objective's inputs after it: they are
added to its batch in between (`_corrected_loss`). A subclass with its own loss or forward pass gets
TRL's batch, scored in advance, and so does a model with dropout, which the engine does not have.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from trl_qurl.config import QuRLGRPOConfig
from trl_qurl.objective import TRL_LOSS
from trl_qurl.rollout.mismatch import valid_logps
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.dynamic_sampling import DynamicSampler, PromptStream, check_dynamic_sampling, weighted_sum
from trl_qurl.trainers.model_card import QURL
from trl_qurl.trainers.rollouts import GroupRolloutsMixin
from trl_qurl.trainers.scoring import cap_of


class QuRLGRPOTrainer(GroupRolloutsMixin, GRPOTrainer):
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
        self._rollout.generated = None
        if self._sampler is not None and self.model.training:
            filled = self._sampler.fill(inputs, self)
            self._record(filled.metrics)
            inputs = [sample.row for sample in filled.samples]
            self._rollout.generated, self._rollout.rewards = filled.generated(), filled.rewards
        # TRL would score the rollout in advance, for its importance ratio, even if the update scores it.
        corrects = self.vllm_importance_sampling_correction and not self._scores_in_update
        with substitute(self, "vllm_importance_sampling_correction", corrects):
            batch = super()._generate_and_score_completions(inputs)
        if "old_per_token_logps" in batch and "sampling_per_token_logps" in batch:
            self._tally(batch, batch["old_per_token_logps"])
            self._record_mismatch()
        return batch

    def _generate(self, prompts: list) -> tuple:
        if self._rollout.generated is not None:
            return self._rollout.generated
        generated = super()._generate(prompts)
        if generated[4] is None and self.args.vllm_importance_sampling_correction:
            raise ValueError(
                "rollout_func returned logprobs=None, but the objective needs them: return a list for each completion "
                "with the log-probability of each token (the third result of trainer.vllm_generation.generate)."
            )
        logps = None if generated[4] is None else valid_logps(generated[4])
        return (*generated[:4], logps, *generated[5:])

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._rollout.generated is None:
            self._rollout.rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rollout.rewards

    # Loss ------------------------------------------------------------------------------------------------------------

    @property
    def _scores_in_update(self) -> bool:
        """True if the loss computes `proximal_logps`: every token is trained on before the policy changes."""
        methods = "_compute_loss", "_get_per_token_logps_and_entropies"
        is_ours = all(getattr(type(self), name) is getattr(QuRLGRPOTrainer, name) for name in methods)
        if self.args.objective == TRL_LOSS or not is_ours or self.args.neftune_noise_alpha or has_dropout(self.model):
            return False
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        return self._corrected_loss(inputs, functools.partial(super()._compute_loss, model))

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _rollout_state(self) -> dict[str, Any]:
        return super()._rollout_state() | {"prompts_drawn": self._sampler and self._sampler.prompts.drawn}

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        if self._sampler is not None and state["prompts_drawn"] is not None:
            self._sampler.prompts.drawn = state["prompts_drawn"]


def has_dropout(model: Any) -> bool:
    """Return whether a model in train mode computes with dropout, or a router with noise."""
    config = model.config.get_text_config().to_dict()
    names = [name for name in config if ("drop" in name or "jitter" in name) and not name.startswith("classifier")]
    is_set = any(config[name] for name in names)
    return is_set or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
