"""How far the policy that sampled (behavior) is from the policy that learns (proximal).

Everything is computed from the ratio before it is capped. Sums are added up over the parts of a rollout and over
processes (`MismatchTally`), then become metrics (`mismatch_metrics`). `B` sequences, `T` completion tokens.
"""

from typing import TYPE_CHECKING

import torch

from trl_qurl.importance import importance_ratio

if TYPE_CHECKING:
    from accelerate import Accelerator


class MismatchTally:
    """The mismatch of a rollout, added up over the parts in which its log-probabilities are computed.

    Args:
        accelerator: Of the processes that share the rollout.
    """

    def __init__(self, accelerator: "Accelerator") -> None:
        self._accelerator = accelerator
        self._parts: list[torch.Tensor] = []  # tokens learned from, `mismatch_sums` and the largest ratio, (7,) each

    def add(self, proximal_logps: torch.Tensor, behavior_logps: torch.Tensor, mask: torch.Tensor, cap: float) -> None:
        """Add a part of the rollout.

        Args:
            proximal_logps: `(B, T)`, in nats.
            behavior_logps: `(B, T)`, in nats; NaN where the engine returned none.
            mask: `(B, T)`, bool: the tokens that are learned from.
            cap: C, a ratio.
        """
        sums, ratio_max = mismatch_sums(proximal_logps, behavior_logps, mask, cap)
        self._parts.append(torch.stack([mask.sum(), *sums, ratio_max]))

    def pop(self) -> dict[str, float]:
        """Metrics of the whole rollout, once. A collective operation.

        Returns:
            Metrics by name, as `mismatch_metrics` has them; none if there was no token to learn from.

        Raises:
            RuntimeError: The engine gave no finite log-probability for any token.
        """
        parts, self._parts = torch.stack(self._parts), []  # (parts, 7)
        # Accelerators without float64 exist; the sums were formed in it.
        sums = self._accelerator.reduce(parts[:, :6].sum(0).float(), reduction="sum")
        ratio_max = self._accelerator.gather(parts[:, 6].max().float()).max().item()
        metrics = mismatch_metrics(sums[1:], ratio_max)
        if not metrics and sums[0] > 0:
            raise RuntimeError(
                "The engine returned no finite log-probability for any token of this rollout: its weights are broken, "
                "and it sampled noise. Resume from the last checkpoint, and report the model and vLLM's version."
            )
        return metrics


def mismatch_sums(
    proximal_logps: torch.Tensor, behavior_logps: torch.Tensor, mask: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Sums over the tokens that vLLM scored, to be added up over processes.

    Args:
        proximal_logps: `(B, T)`, log-probabilities under the full-precision policy at rollout time, in nats.
        behavior_logps: `(B, T)`, log-probabilities under the quantized actor, in nats; NaN where the engine gave none.
        mask: `(B, T)`, 1 for completion tokens that the model produced, 0 for padding and tool output.
        cap: C; a larger ratio counts as capped.

    Returns:
        Sums of (1, log ρ, ρ, ρ², [ρ > C]), shape (5,), float64, and the largest ρ, shape (), 0 without tokens.
    """
    scored = mask.bool() & ~behavior_logps.isnan()
    log_ratio = (proximal_logps - behavior_logps)[scored].double()  # (tokens,)
    ratio = importance_ratio(proximal_logps, behavior_logps)[scored].double()  # (tokens,)
    terms = [torch.ones_like(ratio), log_ratio, ratio, ratio.square(), (ratio > cap).double()]
    return torch.stack([term.sum() for term in terms]), ratio.max() if ratio.numel() else ratio.new_zeros(())


def mismatch_metrics(sums: torch.Tensor, ratio_max: float) -> dict[str, float]:
    r"""Metrics from reduced sums.

    $$k_1 = -\overline{\log\rho}, \quad k_3 = \overline{\rho - 1 - \log\rho}, \quad
      \mathrm{ESS} = \frac{(\sum\rho)^2}{n \sum\rho^2}$$

    Where both k estimate KL(π_behav ‖ π_prox) from tokens of π_behav (Schulman 2020, "Approximating KL Divergence"),
    and ESS is the effective sample size as a share of the n tokens.

    Args:
        sums: First result of `mismatch_sums`, added up over processes, (5,).
        ratio_max: Largest ρ over processes.

    Returns:
        Metric name to value; empty if no token was scored.
    """
    count, log_ratio, ratio, ratio_squared, capped = sums.tolist()
    if count == 0:
        return {}
    return {
        "mismatch/kl_k1": -log_ratio / count,
        "mismatch/kl_k3": (ratio - count - log_ratio) / count,
        "mismatch/ratio_mean": ratio / count,
        "mismatch/ratio_max": float(ratio_max),
        "mismatch/capped_share": capped / count,
        "mismatch/ess": ratio**2 / (count * ratio_squared),
    }
