"""What a report draws and tables, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from trl_qurl.lab.report.curves import (
    Points,
    across_seeds,
    estimate,
    final_value,
    mean_seconds,
    points_of,
    seconds_per_rollout,
    smooth,
    smoothing_window,
)
from trl_qurl.lab.report.figures import DASHES, MARKERS, draw_lines, draw_seconds
from trl_qurl.lab.report.groups import MOST_PER_PLOT, differing, flatten, group_runs, parts_of, wording
from trl_qurl.lab.report.page import differences_table, summary_table
from trl_qurl.lab.report.questions import QUESTIONS, Measure, Panel, ask, held_out_scores
from trl_qurl.trainers.run_log import Run

SETTINGS = {"rollout_quantization": "int8", "objective": "acr", "uaq_scale": 1.0, "seed": 0, "updates_per_rollout": 4}

FULL = {
    **SETTINGS,
    "model": "org/Qwen2.5-0.5B",
    "output_dir": "here",
    "logging_steps": 4,
    "learning_rate": 1e-5,
    "accelerator_config": {"split_batches": False, "even_batches": True},
    "hub_token": "<HUB_TOKEN>",
    "vllm_importance_sampling_clip_max": 2.0,
}

REWARD = Panel("Reward", "mean", (Measure("reward", "Reward"),))
LOG = Panel("Log", "u", (Measure("reward", "Reward"), Measure("other", "Other")), log=True)

SECONDS = {"time/generate_s": 10.0, "time/quantize_s": 1.0, "time/sync_s": 3.0, "time/sync_check_s": 0.5}
SECONDS |= {"time/logps_s": 1.5, "time/update_s": 1.25, "step_time": 5.5}


def run_of(rows=({"step": 4, "reward": 0.5},), path="run.jsonl", **changed):
    return Run(path, {**SETTINGS, **changed}, [dict(row) for row in rows])


def rewards(values, updates=4):
    """One row per rollout, beginning with the first."""
    return [{"step": updates * number, "reward": value} for number, value in enumerate(values, start=1)]


def drawn(runs, *panels):
    """The only figure of these runs, and its description."""
    ((figure, text),) = draw_lines(panels or (REWARD,), group_runs(runs)[0])
    return figure, text


# Curves --------------------------------------------------------------------------------------------------------------


def test_steps_become_rollouts_and_gaps_are_left_out():
    rows = [{"step": 4, "reward": 1}, {"step": 8, "reward": None}, {"step": 10, "reward": math.nan}]
    rows += [{"step": 12, "other": 3.0}, {"step": 16, "reward": 0.25}, {"step": 18, "reward": "text"}]
    rollouts, values = points_of(run_of(rows), "reward")
    assert rollouts.tolist() == [1, 4]  # 4 / 4 and 16 / 4
    assert values.tolist() == [1, 0.25]
    assert points_of(run_of(rows, updates_per_rollout=None), "reward").rollouts.tolist() == [4, 16]  # steps


def test_smoothing_by_hand():
    points = Points(np.arange(1.0, 6), np.array([1.0, 5, 3, 4, 2]))
    # Window 3: the neighbors on either side, and at the ends only one: (1+5)/2, (1+5+3)/3, (5+3+4)/3, (3+4+2)/3, 3.
    assert smooth(points, 3).values.tolist() == [3, 3, 4, 3, 3]
    assert smooth(points, 3, largest=True).values.tolist() == [5, 5, 5, 4, 4]
    assert smooth(points, 1).values.tolist() == points.values.tolist()
    rare = Points(np.array([4.0, 8, 12]), np.array([1.0, 2, 3]))  # further apart than the window reaches
    assert smooth(rare, 7).values.tolist() == [1, 2, 3]


def test_the_window_is_odd_and_a_twentieth():
    assert [smoothing_window(longest) for longest in (1, 39, 40, 120, 1500)] == [1, 1, 3, 7, 75]


def test_mean_and_range_over_seeds_by_hand():
    first = Points(np.array([1.0, 2, 3]), np.array([1.0, 3, 5]))
    gap = Points(np.array([1.0, 3]), np.array([3.0, 7]))  # on the way from 3 to 7: 5 at rollout 2
    long = Points(np.array([2.0, 3, 4]), np.array([4.0, 9, 6]))  # begins later and goes on longer
    curve = across_seeds([first, gap, long])
    assert curve.rollouts.tolist() == [1, 2, 3, 4]
    assert curve.mean.tolist() == [2, 4, 7, 6]  # (1+3)/2, (3+5+4)/3, (5+7+9)/3, 6
    assert curve.low.tolist() == [1, 3, 5, 6]
    assert curve.high.tolist() == [3, 5, 9, 6]


def test_the_end_of_training_is_its_last_twenty_rollouts():
    assert final_value(Points(np.arange(1.0, 31), np.arange(1.0, 31))) == 20.5  # the mean of 11 to 30
    assert final_value(Points(np.array([50.0, 100]), np.array([1.0, 3]))) == 3  # logged every 50 rollouts
    assert final_value(Points(np.empty(0), np.empty(0))) is None


def test_confidence_interval_by_hand():
    # Standard deviation 1, error 1/√3, and 4.303 is the 97.5 % quantile of t with 2 degrees of freedom.
    assert estimate([1, 2, 3]) == pytest.approx((2, 4.303 / math.sqrt(3)))
    assert estimate([5]) == (5, None)
    assert estimate([]) is None
    # From 11 seeds on, the quantile of 10 degrees of freedom; of 0 and 1, six each: 12 values, deviation √(3/11).
    assert estimate([0, 1] * 6).half_width == pytest.approx(2.228 * math.sqrt(3 / 11 / 12))


def test_seconds_by_hand():
    rows = [{"step": 4, **SECONDS, "time/generate_s": 100.0}, {"step": 8, **SECONDS}]
    # The first rollout is left out. Sending is 3 - 1; four updates of 1.25; of four steps of 5.5, 22 s, the parts
    # are 10 + 1 + 2 + 0.5 + 1.5 + 5 = 20.
    expected = {"generation": 10, "gathering, rounding": 1, "sending": 2, "checks": 0.5, "log-probabilities": 1.5}
    assert seconds_per_rollout(run_of(rows)) == pytest.approx(expected | {"updates": 5, "other": 2})
    assert seconds_per_rollout(run_of(rows[:1]))["generation"] == 100  # there is no other
    assert seconds_per_rollout(run_of()) == {}
    # A critic's update is in the update, but not in the step: 22 - (20 - 4 x 0.25).
    critic = {**SECONDS, "time/critic_update_s": 0.25}
    assert seconds_per_rollout(run_of([{"step": 4, **critic}]))["other"] == pytest.approx(3)
    twice = [run_of(rows), run_of([{"step": 4, **SECONDS, "time/generate_s": 20.0}])]
    assert mean_seconds(twice)["generation"] == 15


# Settings, groups and labels -----------------------------------------------------------------------------------------


def labels_of(*changes, base=SETTINGS):
    groups, _ = group_runs([Run("run.jsonl", {**base, **changed}, rewards([1.0])) for changed in changes])
    return [group.label for group in groups]


def test_labels_name_what_differs_and_nothing_else():
    assert labels_of({}) == ["INT8, acr"]  # a single group is named by what the method is about
    assert labels_of({"uaq_scale": 1.5}) == ["INT8, acr, UAQ 1.5"]
    assert labels_of({"objective": "tis"}, {"objective": "naive"}) == ["tis", "naive"]  # in the order given
    study = [
        {"rollout_quantization": "int3", "objective": "acr", "uaq_scale": 1.5},
        {"rollout_quantization": "int3", "objective": "acr"},
        {"rollout_quantization": None, "objective": "naive"},
    ]
    assert labels_of(*study) == ["INT3, acr, UAQ 1.5", "INT3, acr", "BF16, naive"]
    rates = labels_of({"learning_rate": 1e-5}, {"learning_rate": 1e-6}, base=FULL)
    assert rates == ["learning rate 1e-5", "learning rate 1e-6"]
    cap = "vllm_importance_sampling_clip_max"
    assert labels_of({cap: 5.0}, {cap: None}, base=FULL) == ["C 5", "no cap"]
    assert labels_of({"model": "a/base"}, {"model": "b/large"}, base=FULL) == ["base", "large"]
    assert labels_of({"model": "a/base"}, {"model": "b/base"}, base=FULL) == ["base", "base #2"]


def test_what_does_not_change_training_makes_no_group():
    one = {"output_dir": "there", "run_name": "x", "logging_steps": 1, "vllm_server_port": 8001, "hub_token": "secret"}
    other = {"seed": 1, "date": "2026-11-20", "versions": {"torch": "2.13"}, "save_steps": 7, "arm": "x"}
    groups, notes = group_runs([Run("run.jsonl", {**FULL, **changed}, rewards([1.0])) for changed in (one, other)])
    assert [len(group.runs) for group in groups] == [2] and not notes


def test_nested_settings_numbers_and_what_is_missing():
    base = flatten(FULL)
    nested = flatten({**FULL, "accelerator_config": {"split_batches": True, "even_batches": True}})
    assert differing([base, nested]) == ["accelerator_config.split_batches"]
    assert differing([{"uaq_scale": 1}, {"uaq_scale": 1.0}]) == []
    assert differing([{"beta": True}, {"beta": 1}]) == ["beta"]
    short = {"objective": "acr"}  # a shortened log knows few settings, and differs in none of the others
    assert differing([base, short, {"objective": "tis"}]) == ["objective"]
    assert flatten({"a": {"b": {}, "c": 1}}) == {"a.b": {}, "a.c": 1}


def test_generic_settings_are_named_as_far_as_they_tell_runs_apart():
    # Twice the steps go with twice the batch: one name says it all; the table of differences has both.
    changes = [{"steps": 4, "batch": 64}, {"steps": 16, "batch": 16}, {"steps": 16, "batch": 16, "beta": 0.1}]
    for change in changes:
        change.setdefault("beta", 0.0)
    assert labels_of(*changes) == ["steps 4, beta 0", "steps 16, beta 0", "steps 16, beta 0.1"]
    table = differences_table(group_runs([run_of(**change) for change in changes])[0])
    assert table.header == ["Runs", "steps", "batch", "beta"]
    assert table.rows[0] == ["steps 4, beta 0", "4", "64", "0"]


def test_seeds_are_one_group_and_repetitions_are_not_seeds():
    runs = [run_of(rewards([value]), seed=seed) for seed, value in [(0, 1.0), (1, 2.0), (0, 9.0), (0, 8.0)]]
    groups, notes = group_runs(runs)
    assert [group.label for group in groups] == ["INT8, acr", "INT8, acr, repetition 2", "INT8, acr, repetition 3"]
    assert [[run.rows[0]["reward"] for run in group.runs] for group in groups] == [[1, 2], [9], [8]]
    assert len(notes) == 2 and "several runs have seed 0" in notes[0] and "“INT8, acr, repetition 2”" in notes[0]


def test_the_16_bit_format_is_named():
    settings = {"rollout_quantization": None, "fp16": False, "vllm_engine_kwargs.dtype": "float16"}
    assert wording("rollout_quantization", settings) == "FP16"  # the engine's own dtype comes first
    assert wording("rollout_quantization", settings | {"vllm_engine_kwargs.dtype": "bfloat16"}) == "BF16"
    assert wording("rollout_quantization", {"rollout_quantization": None, "fp16": True}) == "FP16"
    assert wording("rollout_quantization", {"rollout_quantization": None}) == "BF16"


def test_many_groups_are_split_with_the_baseline_in_every_part():
    runs = [run_of(rollout_quantization=None)] + [run_of(learning_rate=1e-6 * n) for n in range(1, 11)]
    parts = parts_of(group_runs(runs)[0])
    assert [len(part) for part in parts] == [8, 4]
    assert all(part[0].label.startswith("BF16") for part in parts)
    assert len({(MARKERS[n % len(MARKERS)], DASHES[n % len(DASHES)]) for n in range(MOST_PER_PLOT)}) == 8


# Figures -------------------------------------------------------------------------------------------------------------


def test_a_plot_shows_means_and_bands():
    runs = [
        run_of(rewards([0.1, 0.3, 0.5]), seed=0),
        run_of(rewards([0.3, 0.5, 0.9]), seed=1),
        run_of(rewards([0.2, 0.2]), objective="tis"),
    ]
    figure, text = drawn(runs)
    acr, tis = figure.axes[0].lines
    assert acr.get_xdata().tolist() == [1, 2, 3]
    assert acr.get_ydata() == pytest.approx([0.2, 0.4, 0.7])
    assert (tis.get_xdata().tolist(), tis.get_ydata().tolist()) == ([1, 2], [0.2, 0.2])
    (band,) = figure.axes[0].collections  # of the only group with several seeds
    corners = {(x, round(y, 9)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(1, 0.1), (2, 0.3), (3, 0.5), (1, 0.3), (2, 0.5), (3, 0.9)}
    assert tis.get_color() != acr.get_color() and tis.get_marker() != acr.get_marker()
    (legend,) = figure.legends
    assert [label.get_text() for label in legend.get_texts()] == ["acr (2 seeds)", "tis (1 seed)"]
    assert text == "Lines over rollouts, Reward (mean). At the end: acr (2 seeds) 0.7; tis (1 seed) 0.2."


def test_measures_share_a_plot_of_one_group_and_the_axis_of_several():
    rows = [{"step": 4, "reward": 0.1, "other": 10.0}, {"step": 8, "reward": -1.0, "other": 100.0}]
    figure, _ = drawn([run_of(rows)], LOG)
    (axes,) = figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[0.1], [10, 100]]  # log: only what is above zero
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["Reward", "Other"]
    figure, _ = drawn([run_of(rows), run_of(rows, objective="tis")], LOG)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Reward", "Other"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_axes_begin_where_the_panel_says():
    rows = rewards([-3.0, 0.5, 0.75])
    assert drawn([run_of(rows)], REWARD._replace(at_least=-0.5))[0].axes[0].get_ylim()[0] == -0.5
    assert drawn([run_of(rows[1:])], REWARD._replace(from_zero=True))[0].axes[0].get_ylim()[0] == 0
    assert drawn([run_of(rows)], REWARD._replace(from_zero=True))[0].axes[0].get_ylim()[0] < -3


def test_long_runs_are_smoothed_with_the_logged_values_behind():
    figure, _ = drawn([run_of(rewards([0.0, 1.0] * 20))])
    raw, line = figure.axes[0].lines
    assert raw.get_ydata().tolist() == [0.0, 1.0] * 20
    assert line.get_ydata()[1:3] == pytest.approx([1 / 3, 2 / 3])  # a window of 3


def test_bars_are_stacked_means():
    runs = [
        run_of([{"step": 4, **SECONDS}], seed=0),
        run_of([{"step": 4, **SECONDS, "time/generate_s": 20.0}], seed=1),
        run_of(objective="tis"),  # logged no times
    ]
    ((figure, text),) = draw_seconds(group_runs(runs)[0])
    patches = figure.axes[0].patches
    assert [patch.get_width() for patch in patches][:2] == [15, 1]
    ends = [patch.get_x() + patch.get_width() for patch in patches]
    assert [patch.get_x() for patch in patches] == pytest.approx([0, *ends[:-1]])
    assert [label.get_text() for label in figure.axes[0].texts] == [" 26 s"]  # (22 + 30) / 2, "other" being 2 and 0
    assert "acr generation 15 s" in text and "tis" not in text


# Tables --------------------------------------------------------------------------------------------------------------


def test_summary_by_hand():
    def row(reward, ratio):
        return {"reward": reward, "mismatch/ratio_max": ratio, "clip_ratio/region_mean": 0.0123}

    runs = [
        run_of([{"step": 4, **row(0.5, 900.0)}, {"step": 88, **row(0.6, 2.0)}], seed=0),
        run_of([{"step": 4, **row(0.5, 5.0)}, {"step": 100, **row(0.8, 3.0)}], seed=1),
        run_of([{"step": 4, "reward": 0.25, "mismatch/kl_k3": 4.5e-5}], objective="tis"),
    ]
    table = summary_table(group_runs(runs)[0], [Measure("eval_x", "never logged")])
    assert table.header == ["Runs", "Seeds", "Rollouts", "Reward of the rollouts", "KL, nats", "Largest ρ", "Clipped"]
    # The end is the last row of each. Mean of 0.6 and 0.8; their standard deviation is 0.1 √2, so the error of the
    # mean is 0.1, and t for one degree of freedom 12.706. The largest ratio is that of the whole run.
    assert table.rows == [
        ["acr", "2", "22 to 25", "0.7 ± 1.3", "–", "900", "0.0123"],
        ["tis", "1", "1", "0.25", "4.5e-05", "–", "–"],
    ]


def test_held_out_scores_are_what_evaluation_adds():
    logged = ["reward", "entropy", "eval_gsm8k/avg@1", "eval_runtime", "eval_steps_per_second", "eval_loss"]
    logged += ["eval_entropy", "eval_reward", "rewards/f/mean", "eval_rewards/f/mean", "eval_aime24/actor_avg@1"]
    logged += ["eval_aime24/seconds", "eval_aime24/actor_tokens", "eval_aime24/actor_finished"]
    found = ["eval_aime24/actor_avg@1", "eval_gsm8k/avg@1", "eval_reward", "eval_rewards/f/mean"]
    assert [score.metric for score in held_out_scores(logged)] == found
    labels = [measure.label for measure in ask(logged)[0].panels[1].measures[2:4]]
    assert labels == ["aime24, answered by the actor", "gsm8k/avg@1, held out"]
    assert ask([])[0] == QUESTIONS[0]
