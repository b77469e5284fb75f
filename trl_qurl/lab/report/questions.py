"""What a report asks of runs, as data: the paper's figures and a few more, each with the metrics that answer it.

`docs/metrics.md` says how each metric is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Measure(NamedTuple):
    """A metric and its name in a title or a legend."""

    metric: str
    label: str


class Panel(NamedTuple):
    """Measures in one unit. They share a plot where there is one group of runs; else each has a plot of its own.

    Attributes:
        title: Of the shared plot.
        unit: Of the vertical axis.
        measures: What is drawn.
        log: The vertical axis is logarithmic; what is not above zero is not drawn.
        percent: Values are shares, written as percentages.
        from_zero: The vertical axis starts at zero.
        at_least: The vertical axis starts no lower than this.
        largest: Smoothed by the largest value instead of the mean.
    """

    title: str
    unit: str
    measures: tuple[Measure, ...]
    log: bool = False
    percent: bool = False
    from_zero: bool = False
    at_least: float | None = None
    largest: bool = False


class Question(NamedTuple):
    """One section of a report.

    Attributes:
        name: Of its figures' files.
        title: The question.
        shows: What the plots show.
        healthy: What they show of a healthy run.
        paper: The figure of the paper that it corresponds to, if there is one.
        panels: Its plots; without any, it is answered by bars of seconds.
    """

    name: str
    title: str
    shows: str
    healthy: str
    paper: str
    panels: tuple[Panel, ...] = ()


REWARD = Measure("reward", "Reward of the rollouts")
REGION_CLIPPED = Measure("clip_ratio/region_mean", "Clipped on either side")
KL = Measure("mismatch/kl_k3", "KL(behavior ‖ proximal)")
LARGEST_RATIO = Measure("mismatch/ratio_max", "Largest ratio ρ of a rollout")
EXPLAINED = Measure("critic/explained_variance", "Explained variance")
DEMO_SCORES = (
    Measure("expected_accuracy", "Expected accuracy, held out"),
    Measure("greedy_accuracy", "Greedy accuracy, held out"),
)

ABOUT_EVALUATION = re.compile(
    r"eval_(loss|runtime|model_preparation_time|.*_per_second|.*/seconds|.*_(tokens|finished))$"
)
"""What evaluations log about themselves: those of transformers, and `TaskEvaluationCallback`."""

TASK_SCORE = re.compile(r"(.+)/(actor|policy)_avg@1$")
MEAN_REWARD = re.compile(r"reward$|rewards/.*/mean$")


def ask(metrics: Iterable[str]) -> list[Question]:
    """Adapt `QUESTIONS` to runs that logged these metrics: the held-out scores among them join the first question."""
    learning, *others = QUESTIONS
    reward, held_out = learning.panels
    scores = (*DEMO_SCORES, *held_out_scores(metrics))
    return [learning._replace(panels=(reward, held_out._replace(measures=scores))), *others]


def held_out_scores(metrics: Iterable[str]) -> list[Measure]:
    """What evaluations logged (`eval_*`), except what they log about themselves or about every rollout."""
    names = set(metrics)
    found = []
    for name in sorted(name for name in names if name.startswith("eval_") and not ABOUT_EVALUATION.match(name)):
        rest = name.removeprefix("eval_")
        if task := TASK_SCORE.match(rest):
            found.append(Measure(name, task.expand(r"\1, answered by the \2")))
        elif rest not in names or MEAN_REWARD.match(rest):
            found.append(Measure(name, f"{rest}, held out"))
    return found


def _shares(title: str, *measures: tuple[str, str], unit: str = "share of tokens") -> Panel:
    return Panel(title, unit, tuple(Measure(*measure) for measure in measures), percent=True, from_zero=True)


def _panel(title: str, unit: str, *measures: tuple[str, str], log: bool = False, from_zero: bool = False) -> Panel:
    return Panel(title, unit, tuple(Measure(*measure) for measure in measures), log=log, from_zero=from_zero)


QUESTIONS = (
    Question(
        "learning",
        "Does the policy learn?",
        "The reward is that of the quantized actor on the training prompts. Held-out scores are those of the "
        "full-precision policy unless they name the actor. They are what counts: with an uncorrected objective, the "
        "reward can rise while the policy’s accuracy does not.",
        "Runs with quantized rollouts keep up with BF16 rollouts until the end.",
        "Fig. 2a, 6 and 7",
        (_panel("Reward", "mean per completion", REWARD), Panel("Held-out score", "score", DEMO_SCORES)),
    ),
    Question(
        "clipping",
        "How much is clipped?",
        "Share of tokens whose ratio is beyond the clip range, which stops their gradient.",
        "A few percent at most, and steady. The ratio to the quantized actor (“quantized_ratio”, Eq. 3) clips "
        "several times as much, and in the paper drops to zero as training collapses.",
        "Fig. 2b",
        (
            _shares(
                "Clipped tokens",
                REGION_CLIPPED,
                ("clip_ratio/low_mean", "Clipped below"),
                ("clip_ratio/high_mean", "Clipped above"),
            ),
        ),
    ),
    Question(
        "mismatch",
        "How far is the actor from the policy?",
        "KL divergence between the quantized actor and the policy it was made from (k3 estimator), and how far the "
        "policy moves from there during its updates.",
        "The first is below 0.005 and flat. The paper saw it grow from 0.002 to 0.025 in 1,000 steps of TIS, and then "
        "a collapse.",
        "Fig. 3a",
        (
            _panel(
                "Distance from the proximal policy",
                "nats per token",
                KL,
                ("policy/approx_kl", "KL to the updated policy"),
                log=True,
            ),
        ),
    ),
    Question(
        "ratio",
        "How large does the correction become?",
        "The largest proximal-to-behavior ratio ρ of any token of a rollout.",
        "Below about 10, with rare spikes, which the cap C is for. The paper reports up to 10⁵.",
        "Fig. 3b",
        (Panel("Largest ratio", "ρ", (LARGEST_RATIO,), log=True, largest=True),),
    ),
    Question(
        "difference",
        "How different are the two policies, token by token?",
        "Mean absolute difference between the log-probabilities that actor and policy give the sampled tokens.",
        "Flat. INT8 and FP8 are well below coarser formats.",
        "Fig. 4b",
        (
            _panel(
                "Difference",
                "nats, mean over tokens",
                ("sampling/sampling_logp_difference/mean", "Difference of log-probabilities"),
                from_zero=True,
            ),
        ),
    ),
    Question(
        "weights",
        "Are updates larger than the rounding?",
        "Squared norm of what training changed since the last measurement (Eq. 13), and of what rounding changes "
        "(Eq. 14), both as shares of the squared norm of the quantized layers’ weights.",
        "The error is steady. The closer the updates come to it, the better the actor follows. In the paper they stay "
        "far below it, which is the reason for UAQ.",
        "Fig. 9",
        (
            _panel(
                "Update and error",
                "share of the squared norm",
                ("weights/normalized_update", "Normalized update"),
                ("weights/normalized_quantization_error", "Quantization error"),
                log=True,
            ),
        ),
    ),
    Question(
        "codes",
        "Does the actor notice the updates?",
        "Share of the quantized weights’ codes that differ from those of the previous sync.",
        "Above zero: at zero the actor stays the same, whatever training does.",
        "Fig. 4a, as a measurement",
        (
            _shares(
                "Changed codes", ("weights/codes_changed_share", "Codes changed since the last sync"), unit="codes"
            ),
        ),
    ),
    Question(
        "seconds",
        "Where does the time go?",
        "Mean seconds of a rollout with its updates, without the first rollout, which warms up. The checks of a sync "
        "are its digests and its probe; digests count as sending too. “Other” (rewards, tokenizing) is a lower bound.",
        "Rounding and sending are small compared with generation.",
        "",
    ),
    Question(
        "acr",
        "What does the adaptive clip range let through?",
        "Share of tokens whose upper bound ACR lifts (ρ > C), and of those that it lets through and TIS would clip.",
        "The second is below the first. At zero throughout, ACR is the same as TIS.",
        "Eq. 9",
        (_shares("ACR", ("acr/lifted_share", "Bound lifted"), ("acr/let_through_share", "Let through")),),
    ),
    Question(
        "critic",
        "Does the critic predict the returns?",
        "Share of the returns’ variance that the critic explains, cut off at −0.5, and share of tokens whose value "
        "loss is clipped.",
        "The first rises from zero and stays above it; the second stays below 10 %.",
        "",
        (
            Panel("Explained variance", "share of the returns’ variance", (EXPLAINED,), at_least=-0.5),
            _shares("Clipped values", ("critic/value_clip_share", "Clipped values")),
        ),
    ),
    Question(
        "entropy",
        "Does the policy still explore?",
        "Entropy of the policy’s next token, mean over the sampled tokens.",
        "It falls slowly while rewards rise. A sudden fall to zero, or a rise, precedes a collapse.",
        "",
        (_panel("Entropy", "nats per token", ("entropy", "Entropy"), from_zero=True),),
    ),
    Question(
        "dynamic sampling",
        "What does dynamic sampling cost?",
        "Completions that were discarded because all rewards of their group were equal, and what it took to fill a "
        "batch. The reward of a filtered batch says little; compare that of all completions generated.",
        "Useful groups fill the batch (100 %) after a few rounds.",
        "",
        (
            _shares(
                "Use of what was generated",
                ("dynamic_sampling/discarded_share", "Completions discarded"),
                ("dynamic_sampling/filled_share", "Useful groups in the batch"),
                unit="share",
            ),
            _panel("Rounds", "per rollout", ("dynamic_sampling/rounds", "Rounds"), from_zero=True),
            _panel("Discarded", "tokens", ("dynamic_sampling/extra_tokens", "Tokens discarded")),
            _panel(
                "Reward of all completions",
                "mean per completion",
                ("dynamic_sampling/unfiltered_reward", "Reward of all completions generated"),
            ),
        ),
    ),
)
"""In the order of a report."""
