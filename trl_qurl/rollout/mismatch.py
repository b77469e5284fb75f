"""Measure how far the actor (behavior) is from the policy (proximal).

All metrics are computed from the ratio before it is capped. Sums are accumulated over the parts of
a rollout and over processes (`MismatchTally`), then turned into metrics (`mismatch_metrics`). `B`
sequences, `T` completion tokens.
"""

import math

import torch
from accelerate import Accelerator

from trl_qurl.objective import LARGEST_LOG_RATIO

INVALID_LIMIT = 0.01
"""Maximum share of tokens without a valid log-probability from the engine."""

SERVED_MINUS_INFINITY = -9999.0  # stand-in for -inf in the responses of a vLLM server
LIKELY, UNLIKELY = math.log(0.5), -2.0  # log π_behav and log ρ that contradict each other


def valid_logps(logps: list[list[float | None]]) -> list[list[float | None]]:
    """Replace log-probabilities that no sampled token can have with `None`, which TRL and the
    objectives skip.

    Args:
        logps: The engine's log-probability of each token of each completion, in nats.

    Returns:
        The same values, with `None` for NaN, infinities, and a server's stand-in for -inf.
    """
    return [
        [
            logp if logp is not None and SERVED_MINUS_INFINITY < logp < math.inf else None
            for logp in row
        ]
        for row in logps
    ]


class MismatchTally:
    """Accumulates the mismatch of a rollout over the parts in which its log-probabilities are
    computed.

    Args:
        accelerator: Accelerator of the processes that share the rollout.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._parts: list[torch.Tensor] = []  # `mismatch_sums` and the largest ratio, (10,) each
        # log ρ of the tokens to learn from, (tokens,) each
        self._log_ratios: list[torch.Tensor] = []

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
        self._parts.append(torch.stack([*sums, ratio_max]))
        self._log_ratios.append((proximal_logps - behavior_logps)[mask])

    def sampling_metrics(self, cap: float) -> dict[str, float]:
        """Return TRL's `sampling/*` for the parts so far: TRL computes them only for a rollout
        scored in advance.

        Args:
            cap: C, a ratio.

        Returns:
            Metrics by name.
        """
        log_ratio = torch.cat(self._log_ratios)
        ratio = log_ratio.nan_to_num(0.0).exp().clamp(max=cap)
        metrics: dict[str, float] = {}
        for name, part in {
            "sampling_logp_difference": log_ratio.abs(),
            "importance_sampling_ratio": ratio,
        }.items():
            known = part[~part.isnan()] if part.isfinite().any() else part.new_zeros(1)
            parts = torch.stack([known.mean(), known.max(), known.min()]).unsqueeze(0)
            mean, largest, least = self._accelerator.gather(parts).unbind(1)  # (processes,) each
            metrics |= {
                f"sampling/{name}/mean": mean.mean().item(),
                f"sampling/{name}/max": largest.max().item(),
            }
        return metrics | {"sampling/importance_sampling_ratio/min": least.min().item()}

    def pop(self) -> dict[str, float]:
        """Return the metrics of the whole rollout, and start over. A collective operation.

        Returns:
            Metrics by name, from `mismatch_metrics`; empty if there were no tokens to learn from.

        Raises:
            RuntimeError: More than `INVALID_LIMIT` of the tokens have no valid log-probability from
                the engine.
        """
        parts, self._parts, self._log_ratios = torch.stack(self._parts), [], []  # (parts, 10)
        # Some accelerators lack float64. The terms of a sum are of similar size, so float32 keeps
        # its digits.
        sums = self._accelerator.reduce(parts[:, :-1].sum(0).float(), reduction="sum")
        metrics = mismatch_metrics(
            sums, self._accelerator.gather(parts[:, -1].max().float()).max().item()
        )
        share = metrics.get("mismatch/invalid_share", 0.0)
        if share > INVALID_LIMIT:
            raise RuntimeError(
                f"The engine's log-probability is NaN or infinite for {share:.1%} of this "
                f"rollout's tokens (limit {INVALID_LIMIT:.0%}), so it sampled noise. Usual causes: "
                "16-bit overflow (set dtype='bfloat16' in vllm_engine_kwargs), a faulty kernel "
                "(run `trl-qurl doctor`), or an engine option such as speculative_config (remove "
                "it). Then resume from the last checkpoint."
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
        Sums of (1, log ρ, k3 = ρ − 1 − log ρ, k3², ρ, ρ², [ρ > C], [π_behav ≥ 1/2 and ρ < e⁻²])
        over the tokens with a behavior log-probability, and the number of those without, shape
        (9,), float64; and the largest ρ, shape (), 0 without tokens.
    """
    scored = mask.bool() & behavior_logps.isfinite()
    log_ratio = (proximal_logps.double() - behavior_logps.double())[scored].clamp(
        max=LARGEST_LOG_RATIO
    )
    ratio = log_ratio.exp()  # (tokens,)
    k3 = log_ratio.expm1() - log_ratio  # a difference of the other sums loses its digits near ρ = 1
    terms = [torch.ones_like(ratio), log_ratio, k3, k3.square(), ratio, ratio.square()]
    terms += [
        (ratio > cap).double(),
        ((behavior_logps[scored] >= LIKELY) & (log_ratio < UNLIKELY)).double(),
    ]
    sums = [term.sum() for term in terms] + [(mask.bool() & ~scored).sum().double()]
    return torch.stack(sums), ratio.max() if ratio.numel() else ratio.new_zeros(())


def mismatch_metrics(sums: torch.Tensor, ratio_max: float) -> dict[str, float]:
    r"""Compute metrics from reduced sums.

    $$k_1 = -\overline{\log\rho}, \quad k_3 = \overline{\rho - 1 - \log\rho}, \quad
      \mathrm{ESS} = \frac{(\sum\rho)^2}{n \sum\rho^2}$$

    Where both k estimate KL(π_behav ‖ π_prox) from tokens of π_behav (Schulman 2020, "Approximating
    KL Divergence"), and ESS is the effective sample size as a share of the n tokens.

    Args:
        sums: First result of `mismatch_sums`, added up over processes, (9,).
        ratio_max: Largest ρ over processes.

    Returns:
        Metrics by name; empty without tokens, and only the invalid share if no token was scored.
    """
    count, log_ratio, k3, k3_squared, ratio, ratio_squared, capped, contradicted, invalid = (
        sums.tolist()
    )
    if count + invalid == 0:
        return {}
    share = {"mismatch/invalid_share": invalid / (count + invalid)}
    if count == 0:
        return share
    return share | {
        "mismatch/kl_k1": -log_ratio / count,
        "mismatch/kl_k3": k3 / count,
        "mismatch/kl_k3_error": k3_squared**0.5 / count,
        "mismatch/ratio_mean": ratio / count,
        "mismatch/ratio_max": float(ratio_max),
        "mismatch/capped_share": capped / count,
        "mismatch/contradicted_share": contradicted / count,
        "mismatch/tokens": count,
        "mismatch/ess": ratio**2 / (count * ratio_squared),
    }
