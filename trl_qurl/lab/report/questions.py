"""What a report asks of runs, as data: the paper's figures, and a few more, each with the metrics that answer it.

The metrics are those of the table in the README, which says how each is formed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from trl_qurl.lab.report.seconds import TIMES


class Measure(NamedTuple):
    """A metric and its name in a title or a legend."""

    metric: str
    label: str


class Panel(NamedTuple):
    """Measures in one unit. They share a plot where there is one group of runs; else each has a plot of its own.

    Attributes:
        title: of the shared plot.
        unit: of the vertical axis.
        measures: what is drawn.
        logarithmic: the vertical axis; what is not above zero is not drawn.
        percent: values are shares, written as percentages.
        from_zero: the vertical axis starts at zero.
        at_least: it starts there if values lie lower still.
        largest: smoothed by the largest value instead of the mean.
    """

    title: str
    unit: str
    measures: tuple[Measure, ...]
    logarithmic: bool = False
    percent: bool = False
    from_zero: bool = False
    at_least: float | None = None
    largest: bool = False


class Question(NamedTuple):
    """One section of a report.

    Attributes:
        name: of its pictures' files, and of what is missing where nothing was logged.
        title: the question.
        shows: what the plots show.
        healthy: what they show of a run that goes well.
        paper: the figure of the paper that it corresponds to, if there is one.
        panels: its plots.
        one_scale: its plots are there to be compared and have the same vertical axis.
        about_seconds: it is answered by bars of seconds instead of plots over rollouts.
    """

    name: str
    title: str
    shows: str
    healthy: str
    paper: str
    panels: tuple[Panel, ...] = ()
    one_scale: bool = False
    about_seconds: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that answer it."""
        return TIMES if self.about_seconds else tuple(m.metric for panel in self.panels for m in panel.measures)


REWARD = Measure("reward", "Reward of the rollouts")
REGION_CLIPPED = Measure("clip_ratio/region_mean", "Clipped on either side")
KL = Measure("mismatch/kl_k3", "KL(behaviour ‖ proximal)")
LARGEST_RATIO = Measure("mismatch/ratio_max", "Largest ratio ρ of a rollout")
DEMO_SCORES = (
    Measure("expected_accuracy", "Expected accuracy, held out"),
    Measure("greedy_accuracy", "Greedy accuracy, held out"),
)

NO_SCORE = re.compile(r"eval_(loss|runtime|model_preparation_time|.*_per_second|.*/seconds|.*_tokens|.*_finished)$")
"""What evaluations log about themselves: transformers' own, and those of tasks."""

TASK_SCORE = re.compile(r"(.+)/(actor|policy)_avg@1$")
TASK_LABEL = r"\1, answered by the \2"
"""Of benchmarks that are answered during training."""

MEAN_REWARD = re.compile(r"reward$|rewards/.*/mean$")

QUESTIONS = (
    Question(
        "learning",
        "Does the policy learn?",
        "The reward is the quantized actor’s, on the prompts it trains on. Held-out scores are the full-precision "
        "policy’s, unless they name the actor, and what counts: an uncorrected objective can raise the reward and not "
        "the policy’s accuracy.",
        "Runs with quantized rollouts keep up with BF16 rollouts until the end.",
        "Fig. 2a, 6 and 7",
        (
            Panel("Reward", "mean per completion", (REWARD,)),
            Panel("Held-out score", "score", DEMO_SCORES),
        ),
    ),
    Question(
        "clipping",
        "How much is clipped?",
        "Share of tokens whose ratio lies beyond the clip range, where it stops their gradient.",
        "A few percent at most, and steady. The ratio to the quantized actor (“quantized_ratio”, Eq. 3) clips "
        "several times as much, and in the paper drops to zero as training collapses.",
        "Fig. 2b",
        (
            Panel(
                "Clipped tokens",
                "share of tokens",
                (
                    REGION_CLIPPED,
                    Measure("clip_ratio/low_mean", "Clipped below"),
                    Measure("clip_ratio/high_mean", "Clipped above"),
                ),
                percent=True,
                from_zero=True,
            ),
        ),
    ),
    Question(
        "mismatch",
        "How far is the actor from the policy?",
        "KL divergence of the quantized actor from the policy that it was made of (k3 estimator), and how far the "
        "policy has moved from there while it is updated.",
        "The first is below 0.005 and flat; the paper saw it grow from 0.002 to 0.025 in 1,000 steps of TIS, and "
        "then a collapse.",
        "Fig. 3a",
        (
            Panel(
                "Distance from the proximal policy",
                "nats per token",
                (KL, Measure("policy/approx_kl", "KL to the updated policy")),
                logarithmic=True,
            ),
        ),
    ),
    Question(
        "ratio",
        "How large does the correction become?",
        "The largest proximal-to-behaviour ratio ρ of any token of a rollout.",
        "Below about 10, with rare spikes, which the cap C is there for; the paper reports up to 10⁵.",
        "Fig. 3b",
        (Panel("Largest ratio", "ρ", (LARGEST_RATIO,), logarithmic=True, largest=True),),
    ),
    Question(
        "difference",
        "How different are the two policies, token by token?",
        "Mean absolute difference of the log-probabilities that actor and policy give the sampled tokens.",
        "Flat; INT8 and FP8 lie well below coarser formats.",
        "Fig. 4b",
        (
            Panel(
                "Difference",
                "nats, mean over tokens",
                (Measure("sampling/sampling_logp_difference/mean", "Difference of log-probabilities"),),
                from_zero=True,
            ),
        ),
    ),
    Question(
        "weights",
        "Are updates larger than the rounding?",
        "Squared norm of what training changed since the last measurement (Eq. 13), and of what rounding changes "
        "(Eq. 14), both as shares of the squared norm of the quantized layers’ weights.",
        "The error is steady. The closer updates come to it, the better the actor follows; in the paper they stay far "
        "below, which is what UAQ is for.",
        "Fig. 9",
        (
            Panel(
                "Update and error",
                "share of the squared norm",
                (
                    Measure("weights/normalized_update", "Normalised update"),
                    Measure("weights/normalized_quantization_error", "Quantization error"),
                ),
                logarithmic=True,
            ),
        ),
        one_scale=True,
    ),
    Question(
        "codes",
        "Does the actor notice the updates?",
        "Share of the quantized weights’ codes that differ from those of the previous sync.",
        "Above zero: at zero the actor stays as it is, whatever training does.",
        "Fig. 4a, as a measurement",
        (
            Panel(
                "Changed codes",
                "share of codes",
                (Measure("weights/codes_changed_share", "Codes changed since the last sync"),),
                percent=True,
                from_zero=True,
            ),
        ),
    ),
    Question(
        "seconds",
        "Where does the time go?",
        "Mean seconds of a rollout with its updates, without the first rollout, which warms up. Checks of a sync are "
        "its digests and probe; digests count as sending too. “Other” (rewards, tokenizing, …) is a lower bound.",
        "Rounding and sending are small beside generation.",
        "",
        about_seconds=True,
    ),
    Question(
        "acr",
        "What does the adaptive clip range let through?",
        "Share of tokens whose upper bound ACR lifts (ρ > C), and of those that it lets through and TIS would clip.",
        "The second is below the first. At zero throughout, ACR does nothing that TIS would not.",
        "Eq. 9",
        (
            Panel(
                "ACR",
                "share of tokens",
                (Measure("acr/lifted_share", "Bound lifted"), Measure("acr/let_through_share", "Let through")),
                percent=True,
                from_zero=True,
            ),
        ),
    ),
    Question(
        "critic",
        "Does the critic know what to expect?",
        "Share of the returns’ variance that the critic explains, as far down as −0.5, and share of tokens whose "
        "value loss is clipped.",
        "The first rises from zero and stays above it; the second stays below 10 %.",
        "",
        (
            Panel(
                "Explained variance",
                "share of the returns’ variance",
                (Measure("critic/explained_variance", "Explained variance"),),
                at_least=-0.5,
            ),
            Panel(
                "Clipped values",
                "share of tokens",
                (Measure("critic/value_clip_share", "Clipped values"),),
                percent=True,
                from_zero=True,
            ),
        ),
    ),
    Question(
        "entropy",
        "Does the policy still explore?",
        "Entropy of the policy’s next token, mean over the sampled tokens.",
        "It falls slowly while rewards rise; a sudden fall to zero, or a rise, comes before a collapse.",
        "",
        (Panel("Entropy", "nats per token", (Measure("entropy", "Entropy"),), from_zero=True),),
    ),
    Question(
        "dynamic sampling",
        "What does dynamic sampling cost?",
        "Completions made and thrown away because their group’s rewards were all alike, and what it took to fill a "
        "batch. With it the reward of a batch says little; that of all completions made can be compared.",
        "Useful groups fill the batch (100 %) after a few rounds.",
        "",
        (
            Panel(
                "Use of what was generated",
                "share",
                (
                    Measure("dynamic_sampling/discarded_share", "Completions thrown away"),
                    Measure("dynamic_sampling/filled_share", "Useful groups in the batch"),
                ),
                percent=True,
                from_zero=True,
            ),
            Panel("Rounds", "per rollout", (Measure("dynamic_sampling/rounds", "Rounds"),), from_zero=True),
            Panel("Thrown away", "tokens", (Measure("dynamic_sampling/extra_tokens", "Tokens thrown away"),)),
            Panel(
                "Reward of all made",
                "mean per completion",
                (Measure("dynamic_sampling/unfiltered_reward", "Reward of all completions made"),),
            ),
        ),
    ),
)
"""In the order of a report. The metrics of time are in `seconds`."""


def ask(metrics: Iterable[str]) -> list[Question]:
    """The questions about runs that logged these metrics: `QUESTIONS`, with the held-out scores found among them."""
    scores = (*DEMO_SCORES, *held_out_scores(metrics))
    learning, *others = QUESTIONS
    reward, held_out = learning.panels
    return [learning._replace(panels=(reward, held_out._replace(measures=scores))), *others]


def held_out_scores(metrics: Iterable[str]) -> list[Measure]:
    """What evaluations logged (`eval_*`), less what they log about themselves or of any rollout."""
    names = set(metrics)
    found = sorted(name for name in names if name.startswith("eval_") and not NO_SCORE.match(name))
    return [
        Measure(name, f"{rest}, held out" if (score := TASK_SCORE.match(rest)) is None else score.expand(TASK_LABEL))
        for name in found
        if (rest := name.removeprefix("eval_")) not in names or MEAN_REWARD.match(rest)
    ]
