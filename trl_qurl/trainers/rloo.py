"""`QuRLRLOOTrainer`: TRL's `RLOOTrainer` with quantized rollouts and a correction for the mismatch.

Baseline, advantages, KL penalty and loss stay TRL's. TRL's RLOO drops the engine's log-probabilities, so this file
takes them from the backend and compares them with TRL's scoring pass, which RLOO always runs. Inside TRL's loss, the
objective's weights scale the gradient of the forward pass; the loss's value, ratio and clipping do not change.
"""

from typing import Any

import torch
from trl import RLOOTrainer
from trl.trainer import rloo_trainer
from trl.trainer.utils import pad

from trl_qurl.config import QuRLRLOOConfig
from trl_qurl.objective import TRL_LOSS
from trl_qurl.rollout.mismatch import valid_logps
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.grpo import cap_of, learned_tokens, loss_metrics, objective_terms
from trl_qurl.trainers.model_card import QURL
from trl_qurl.trainers.rollouts import QuantizedRolloutsMixin


class QuRLRLOOTrainer(QuantizedRolloutsMixin, RLOOTrainer):
    """[`~trl.RLOOTrainer`] with rollouts from a quantized copy of the policy, updated before every generation.

    RLOO clips the ratio R of a whole completion y. The objective (`args.objective`) weights each token's contribution
    to the gradient, with `"tis"` by its truncated importance ratio:

        ∇J = A · R · Σ_t w_t · ∇log π_θ(y_t) where R is not clipped,    R = ∏_t π_θ(y_t) / π_prox(y_t),
        w_t = min(ρ_t, C),    ρ_t = π_prox(y_t) / π_behav(y_t)

    Where π_prox and π_behav are the full-precision and the quantized policy at rollout time. Sources: the weight is
    FlashRL's (Eq. 5 of QuRL, arXiv 2602.13953); GSPO-token also combines token weights with a ratio of completions
    (arXiv 2507.18071).

    One weight per completion, ∏_t ρ_t, would be exact, but would leave few effective samples (docs/algorithms.md).

    The arguments are those of [`QuRLGRPOTrainer`], with a [`QuRLRLOOConfig`] or a [`~trl.RLOOConfig`] for `args`.
    """

    _config_class = QuRLRLOOConfig
    _generation_module = rloo_trainer
    _algorithm = "RLOO"
    _tag_names = ["trl", "rloo", "qurl"]
    _name = "QuRL"
    _paper = QURL

    _token_weights: torch.Tensor | None = None  # of the loss being computed, (B, T)
    _passes: tuple[torch.Tensor, ...] = ()  # log-probabilities of the latest forward passes, (B, T) each

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        with substitute(self, "_passes", ()):
            batch = super()._generate_and_score_completions(inputs)
            proximal_logps = self._passes[0]  # (B, T), the policy's; the reference model's would be second
        batch |= self._objective_inputs(batch, proximal_logps, self._behavior_logps())
        self._record_mismatch()
        return batch

    def _behavior_logps(self) -> torch.Tensor:
        """Return the engine's log-probabilities of the rollout's tokens, (B, T); NaN if it returned none."""
        logps = valid_logps([[logp for (logp,) in tokens] for tokens in self.vllm_generation.sampled_logps])
        rows = [torch.tensor([torch.nan if logp is None else logp for logp in row]) for row in logps]
        return pad(rows, pad_to_multiple_of=self.pad_to_multiple_of).to(self.accelerator.device)

    def _objective_inputs(
        self, batch: dict[str, Any], proximal_logps: torch.Tensor, behavior_logps: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the inputs from which the loss computes the objective, and tally the mismatch."""
        learned = learned_tokens(batch)  # (B, T)
        self._mismatch.add(proximal_logps, behavior_logps, learned, cap_of(self.args))
        if self.args.objective == TRL_LOSS:
            return {"proximal_logps": proximal_logps}
        terms = objective_terms(self.args, batch, proximal_logps, behavior_logps)
        old_logps = (terms.old_logps * learned).sum(1)  # (B,)
        return {"old_logps": old_logps, "token_weights": terms.weight, "proximal_logps": proximal_logps}

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        with substitute(self, "_token_weights", inputs.get("token_weights")), substitute(self, "_passes", ()):
            loss = super()._compute_loss(model, inputs)
            policy_logps = self._passes[0]  # the loss runs one forward pass
        logps, learned = (policy_logps, inputs["proximal_logps"]), learned_tokens(inputs)
        self._record(loss_metrics(*logps, inputs, learned, self._sum_over_processes))
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._passes += (logps.detach(),)
        if self._token_weights is not None:
            logps = weigh_gradient(logps, self._token_weights)
        return logps, *others


def weigh_gradient(logps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply the gradient of each token's log-probability by a weight, without changing its value.

        log π_t → sg(log π_t) + w_t · (log π_t − sg(log π_t))

    Where sg stops the gradient. A function f of the result has the gradient Σ_t w_t · ∂f/∂log π_t · ∇log π_t.
    `logps` and `weights` are `(B, T)`; the weights must be finite.
    """
    fixed = logps.detach()
    return fixed + weights * (logps - fixed)
