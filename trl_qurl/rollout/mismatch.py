"""Measure how far the actor (behavior) is from the policy (proximal).

All metrics are computed from the ratio before it is capped. Sums are accumulated over the parts of
a rollout and over processes (`MismatchTally`), then turned into metrics (`mismatch_metrics`). `B`
sequences, `T` completion tokens.
"""

import math
from typing import Generic, NamedTuple, TypeVar

import torch
from accelerate import Accelerator

from trl_qurl.objective import LARGEST_LOG_RATIO

INVALID_LIMIT = 0.01
"""Maximum share of tokens without a valid log-probability from the engine."""

SERVED_MINUS_INFINITY = -9999.0  # stand-in for -inf in the responses of a vLLM server
# log π_behav and log ρ of a token that contradict each other
LIKELY = math.log(0.5)
UNLIKELY = -2.0

Number = TypeVar("Number", torch.Tensor, float)


def valid_logps(logps: torch.Tensor) -> torch.Tensor:
    """Replace log-probabilities that no sampled token can have with NaN: the objectives skip these.

    Args:
        logps: The engine's log-probabilities of sampled tokens, in nats, of any shape.

    Returns:
        The same values, with NaN for infinities and for a server's stand-in for -inf.
    """
    is_valid = (logps > SERVED_MINUS_INFINITY) & (logps < math.inf)
    return logps.where(is_valid, math.nan)


class Sums(NamedTuple, Generic[Number]):
    """Sums over the tokens with a behavior log-probability, as tensors or, at last, numbers."""

    tokens: Number  # their number
    log_ratio: Number  # log ρ
    k3: Number  # ρ − 1 − log ρ
    k3_squared: Number  # k3²
    ratio: Number  # ρ
    ratio_squared: Number  # ρ²
    capped: Number  # tokens with ρ > C
    contradicted: Number  # tokens with π_behav ≥ 1/2 and ρ < e⁻²
    invalid: Number  # the other tokens, without a behavior log-probability


class MismatchTally:
    """Accumulates a rollout's mismatch over the parts in which log-probabilities are computed.

    Args:
        accelerator: Accelerator of the processes that share the rollout.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._start_over()

    def _start_over(self) -> None:
        # by part
        self._sums: list[torch.Tensor] = []  # of `mismatch_sums`, (9,) each
        self._ratio_maxima: list[torch.Tensor] = []  # () each

    def add(
        self,
        proximal_logps: torch.Tensor,
        behavior_logps: torch.Tensor,
        mask: torch.Tensor,
        cap: float,
    ) -> None:
        """Add a part of the rollout.

        Args:
            proximal_logps: `(B, T)`, in nats.
            behavior_logps: `(B, T)`, in nats; NaN where the engine returned no valid value.
            mask: `(B, T)`, bool: the tokens to learn from.
            cap: C, a ratio.
        """
        sums, ratio_max = mismatch_sums(proximal_logps, behavior_logps, mask, cap)
        self._sums.append(sums)
        self._ratio_maxima.append(ratio_max)

    def pop(self) -> dict[str, float]:
        """Return the metrics of the whole rollout, and start over. A collective operation.

        Returns:
            Metrics by name, from `mismatch_metrics`; empty if there were no tokens to learn from.

        Raises:
            RuntimeError: More than `INVALID_LIMIT` of the tokens have no valid log-probability from
                the engine.
        """
        # Some accelerators lack float64. The terms of a sum are of similar size, so float32 keeps
        # its digits.
        sums_here = torch.stack(self._sums).sum(0).float()
        ratio_max_here = torch.stack(self._ratio_maxima).max().float()
        self._start_over()
        sums = self._accelerator.reduce(sums_here, reduction="sum")
        ratio_max = self._accelerator.gather(ratio_max_here).max()
        metrics = mismatch_metrics(sums, ratio_max.item())
        share = metrics.get("mismatch/invalid_share", 0.0)
        if share > INVALID_LIMIT:
            raise RuntimeError(
                f"The engine's log-probability is NaN or infinite for {share:.1%} of this "
                "rollout's tokens, so it sampled noise. Usual causes: overflow in float16 (set "
                "dtype='bfloat16' in vllm_engine_kwargs; on a GPU without it, 'float32' and "
                "rollout_quantization=None), a faulty kernel (run `trl-qurl doctor`), or an "
                "unusual engine option. Then resume from the last checkpoint."
            )
        return metrics


def mismatch_sums(
    proximal_logps: torch.Tensor, behavior_logps: torch.Tensor, mask: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Return sums over the tokens to learn from, to be added up over processes.

    Args:
        proximal_logps: `(B, T)`, log-probabilities under the full-precision policy at rollout time,
            in nats.
        behavior_logps: `(B, T)`, log-probabilities under the actor, in nats; NaN where it returned
            none.
        mask: `(B, T)`, 1 for completion tokens that the model generated, 0 for padding and tool
            output.
        cap: C; a larger ratio counts as capped.

    Returns:
        `Sums`, shape (9,), float64; and the largest ρ, shape (), 0 without tokens.
    """
    learned = mask.bool()
    scored = learned & behavior_logps.isfinite()
    log_ratio = (proximal_logps.double() - behavior_logps.double())[scored]  # (tokens,)
    log_ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    k3 = log_ratio.expm1() - log_ratio  # a difference of the other sums loses its digits near ρ = 1
    contradicted = (behavior_logps[scored] >= LIKELY) & (log_ratio < UNLIKELY)
    sums = Sums(
        tokens=scored.sum().double(),
        log_ratio=log_ratio.sum(),
        k3=k3.sum(),
        k3_squared=k3.square().sum(),
        ratio=ratio.sum(),
        ratio_squared=ratio.square().sum(),
        capped=(ratio > cap).sum().double(),
        contradicted=contradicted.sum().double(),
        invalid=(learned & ~scored).sum().double(),
    )
    ratio_max = ratio.max() if ratio.numel() else ratio.new_zeros(())
    return torch.stack(sums), ratio_max


def mismatch_metrics(sums: torch.Tensor, ratio_max: float) -> dict[str, float]:
    r"""Compute metrics from reduced sums.

    $$k_1 = -\overline{\log\rho}, \quad k_3 = \overline{\rho - 1 - \log\rho}, \quad
      \mathrm{ESS} = \frac{(\sum\rho)^2}{n \sum\rho^2}$$

    Where both k estimate KL(π_behav ‖ π_prox) from tokens of π_behav (Schulman 2020, "Approximating
    KL Divergence"), and ESS is the effective sample size as a share of the n tokens.

    Args:
        sums: `Sums` from `mismatch_sums`, added up over processes, (9,).
        ratio_max: Largest ρ over processes.

    Returns:
        Metrics by name; empty without tokens, and only the invalid share if no token was scored.
    """
    total = Sums(*sums.tolist())
    if total.tokens + total.invalid == 0:
        return {}
    share = {"mismatch/invalid_share": total.invalid / (total.tokens + total.invalid)}
    if total.tokens == 0:
        return share
    return share | {
        "mismatch/kl_k1": -total.log_ratio / total.tokens,
        "mismatch/kl_k3": total.k3 / total.tokens,
        "mismatch/kl_k3_error": total.k3_squared**0.5 / total.tokens,
        "mismatch/ratio_mean": total.ratio / total.tokens,
        "mismatch/ratio_max": float(ratio_max),
        "mismatch/capped_share": total.capped / total.tokens,
        "mismatch/contradicted_share": total.contradicted / total.tokens,
        "mismatch/tokens": total.tokens,
        "mismatch/ess": total.ratio**2 / (total.tokens * total.ratio_squared),
    }
