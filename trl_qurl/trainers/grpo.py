"""`QuRLGRPOTrainer`: TRL's `GRPOTrainer` with quantized rollouts and the paper's objectives.

From the log-probabilities of the actor and of the policy, it computes what TRL's loss reads
(`old_per_token_logps` and `importance_sampling_ratio`). With one update per rollout, the
log-probabilities "at rollout time" are those of the update: TRL's loss makes the only forward pass,
and these inputs are added to its batch after it.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from trl_qurl.advantages import weighted_sum
from trl_qurl.config.grpo import QuRLGRPOConfig
from trl_qurl.rollout.results import Generated
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.arguments import takes
from trl_qurl.trainers.dynamic_sampling import DynamicSampler, PromptStream
from trl_qurl.trainers.model_card import QURL
from trl_qurl.trainers.rollouts import GroupRolloutsMixin
from trl_qurl.trainers.scoring import Batch, cap_of


class QuRLGRPOTrainer(GroupRolloutsMixin, GRPOTrainer):
    """[`~trl.GRPOTrainer`] with rollouts from an actor: a quantized copy of the policy.

    The actor is updated before each rollout. Training stays in full precision, and the objective
    (`args.objective`) corrects for the difference. The method and its defaults follow QuRL (arXiv
    2602.13953).

    Args:
        model: This and all other arguments but `args`, in their order or by name: see
            [`~trl.GRPOTrainer`].
        args: A [`QuRLGRPOConfig`]; `None` for the defaults.

    Raises:
        TypeError: An argument does not exist, or `args` is no `QuRLGRPOConfig`.
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

    @takes(GRPOTrainer.__init__)
    def __init__(self, *positional: Any, **kwargs: Any) -> None:
        super().__init__(*positional, **kwargs)
        if self._objective is not None:  # for TRL's `sampling/*`, and a subclass's own loss
            self.vllm_importance_sampling_mode = "token_truncate"
            self.vllm_importance_sampling_clip_min = None
            self.vllm_importance_sampling_clip_max = cap_of(self.args)
        if self.args.dynamic_sampling:
            prompts = PromptStream(self.train_dataset, self.args.seed)
            judge = self._judge_of_groups()
            self._sampler = DynamicSampler(self.num_generations, judge, prompts, self.accelerator)

    def _judge_of_groups(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what makes the reward that decides from all, (N, functions) to (N,)."""
        if self.args.dynamic_sampling_reward is not None:
            index = self.reward_func_names.index(self.args.dynamic_sampling_reward)
            return functools.partial(torch.select, dim=1, index=index)
        trainer = weakref.proxy(self)  # a callback may replace the weights
        return lambda rewards: weighted_sum(rewards, trainer.reward_weights)

    def _begin_rollout(self, inputs: Any) -> Any:
        rows = super()._begin_rollout(inputs)
        if self._sampler is None or not self.model.training:
            return rows
        filled = self._sampler.fill(rows, self)
        self._record(filled.metrics)
        self._rollout.filled = filled
        return [sample.row for sample in filled.samples]

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        # TRL would score the rollout in advance, for its importance ratio, even if the update
        # scores it.
        corrects = self.vllm_importance_sampling_correction and not self._scores_in_update
        with substitute(self, "vllm_importance_sampling_correction", corrects):
            return super()._generate_and_score_completions(inputs)

    def _generate(self, prompts: list) -> tuple:
        filled = self._rollout.filled
        if filled is not None:
            return filled.generated()
        generated = Generated(*super()._generate(prompts))
        logps = generated.logprobs
        if logps is None:
            if self.args.vllm_importance_sampling_correction:
                raise ValueError(
                    "rollout_func returned logprobs=None, but the objective needs them: return a "
                    "list for each completion (the third result of "
                    "trainer.vllm_generation.generate)."
                )
        elif self.rollout_func is not None:  # may return the engine's lists, of one number each
            logps = [[one[0] if isinstance(one, list) else one for one in row] for row in logps]
        return generated._replace(logprobs=logps)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        filled = self._rollout.filled
        if filled is None:
            return super()._calculate_rewards(*args, **kwargs)
        self._rollout.rewards = filled.rewards
        return filled.rewards

    @property
    def _scores_in_update(self) -> bool:
        """Whether all tokens are trained on before the policy changes, by our loss, without noise.

        That is so with one update per rollout, or several rollouts per update. Then there is no
        pass in advance: the loss's own pass completes its inputs, and `_record_update` judges.
        A subclass with its own loss or forward pass gets a batch that is scored in advance, and so
        does a model with dropout, which the engine does not have.
        """
        for name in ("_compute_loss", "_get_per_token_logps_and_entropies"):
            if getattr(type(self), name) is not getattr(QuRLGRPOTrainer, name):
                return False
        has_noise = self.args.neftune_noise_alpha or has_dropout(self.model)
        if self._objective is None or has_noise:
            return False
        micro_batches = self.args.steps_per_generation * self.num_iterations  # per rollout
        return self.args.gradient_accumulation_steps % micro_batches == 0

    def _rollout_state(self) -> dict[str, Any]:
        state = super()._rollout_state()
        state["prompts_drawn"] = None if self._sampler is None else self._sampler.prompts.drawn
        return state

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        if self._sampler is not None and state["prompts_drawn"] is not None:
            self._sampler.prompts.drawn = state["prompts_drawn"]


def has_dropout(model: Any) -> bool:
    """Return whether a model in train mode computes with dropout, or a router with noise.

    Settings of its config count, because many models draw masks without a `nn.Dropout`. One of a
    head that the model does not have costs a pass in advance, and changes nothing else.
    """
    for name, value in model.config.get_text_config().to_dict().items():
        is_noise = "drop" in name or "jitter" in name
        if is_noise and isinstance(value, float) and value > 0:  # no switch
            return True
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
