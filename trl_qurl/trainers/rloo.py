"""`QuRLRLOOTrainer`: TRL's `RLOOTrainer` with quantized rollouts and a correction for the mismatch.

Baseline, advantages, KL penalty and loss stay TRL's. TRL's RLOO drops the engine's
log-probabilities, so this file takes them from the backend and compares them with TRL's scoring
pass, which RLOO always runs. Inside TRL's loss, the objective's weights scale the gradient of the
forward pass; the loss's value, ratio and clipping do not change.
"""

from typing import Any

import torch
from trl import RLOOTrainer
from trl.trainer import rloo_trainer
from trl.trainer.utils import pad

from trl_qurl.config.rloo import QuRLRLOOConfig
from trl_qurl.trainers.arguments import takes
from trl_qurl.trainers.model_card import QURL
from trl_qurl.trainers.rollouts import GroupRolloutsMixin
from trl_qurl.trainers.scoring import Batch, learned_tokens


class QuRLRLOOTrainer(GroupRolloutsMixin, RLOOTrainer):
    """[`~trl.RLOOTrainer`] with rollouts from a quantized copy of the policy.

    RLOO clips the ratio R of a whole completion y. The objective (`args.objective`) weights each
    token's contribution to the gradient, with `"tis"` by its truncated importance ratio:

        ∇J = A · R · Σ_t w_t · ∇log π_θ(y_t)    where R is not clipped
        R = ∏_t π_θ(y_t) / π_prox(y_t)
        w_t = min(ρ_t, C),    ρ_t = π_prox(y_t) / π_behav(y_t)

    Where π_prox is the policy at rollout time and π_behav the actor. Sources: the weight is
    FlashRL's (Eq. 5 of QuRL, arXiv 2602.13953); GSPO-token also combines token weights with a ratio
    of completions (arXiv 2507.18071).

    One weight per completion, ∏_t ρ_t, would be exact, but would leave few effective samples
    (docs/algorithms.md).

    The arguments are those of [`~trl.RLOOTrainer`], with a [`QuRLRLOOConfig`] for `args`.
    """

    _config_class = QuRLRLOOConfig
    _generation_module = rloo_trainer
    _algorithm = "RLOO"
    _tag_names = ["trl", "rloo", "qurl"]
    _name = "QuRL"
    _paper = QURL

    @takes(RLOOTrainer.__init__)
    def __init__(self, *positional: Any, **kwargs: Any) -> None:
        super().__init__(*positional, **kwargs)

    def _missing_logps(self, proximal_logps: torch.Tensor | None) -> Batch:
        rows = [logps[:, 0] for logps, _ in self._rollout.samples.listings]
        behavior_logps = pad(rows, pad_to_multiple_of=self.pad_to_multiple_of)  # (B, T)
        return {
            "old_per_token_logps": proximal_logps,
            "sampling_per_token_logps": behavior_logps.to(self.accelerator.device),
        }

    def _objective_inputs(
        self, batch: Batch, proximal_logps: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        inputs = super()._objective_inputs(batch, proximal_logps)
        if inputs:  # one ratio per completion
            learned_logps = inputs["old_per_token_logps"] * learned_tokens(batch)  # (B, T)
            inputs["old_logps"] = learned_logps.sum(1)  # (B,)
        return inputs

    def _weigh(self, logps: torch.Tensor, inputs: Batch) -> torch.Tensor:
        weights = inputs.get("importance_sampling_ratio")
        return logps if weights is None else weigh_gradient(logps, weights)


def weigh_gradient(logps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply the gradient of each token's log-probability by a weight, and keep its value.

        log π_t → sg(log π_t) + w_t · (log π_t − sg(log π_t))

    Where sg stops the gradient. A function f of the result has the gradient Σ_t w_t · ∂f/∂log π_t ·
    ∇log π_t. `logps` and `weights` are `(B, T)`; the weights must be finite.
    """
    fixed = logps.detach()
    return fixed + weights * (logps - fixed)
