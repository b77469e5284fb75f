"""The report: what is drawn and tabled against numbers worked out by hand, and the page as a browser would read it."""

import base64
import gzip
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

from trl_qurl.lab.report import write as writing
from trl_qurl.lab.report.bars import bars_of, draw_bars
from trl_qurl.lab.report.curves import (
    Points,
    across_seeds,
    estimate,
    final_value,
    points_of,
    smooth,
    smoothing_window,
    student_t,
)
from trl_qurl.lab.report.groups import MOST_PER_PLOT, group_runs, make_facets
from trl_qurl.lab.report.numerals import numeral, percentage, tick, with_error
from trl_qurl.lab.report.pictures import COLORS, DASHES, MARKERS, draw_plot, to_png
from trl_qurl.lab.report.plots import Curves, plots_of
from trl_qurl.lab.report.questions import QUESTIONS, Measure, Panel, Question, ask, held_out_scores
from trl_qurl.lab.report.runs import load_runs
from trl_qurl.lab.report.seconds import mean_seconds, seconds_per_rollout
from trl_qurl.lab.report.settings import common, differing, flatten, origins, set_aside
from trl_qurl.lab.report.summary import differences_table, summary_table
from trl_qurl.lab.report.write import write_report
from trl_qurl.trainers.run_log import Run

SETTINGS = {"rollout_quantization": "int8", "objective": "acr", "uaq_scale": 1.0, "seed": 0, "updates_per_rollout": 4}

# As TrainingArguments.to_dict() has them: much that says where and how a run was made, and nested dictionaries.
FULL = {
    **{f"field_{number}": None for number in range(300)},
    **SETTINGS,
    "model": "org/Qwen2.5-0.5B",
    "output_dir": "here",
    "run_name": None,
    "logging_steps": 4,
    "learning_rate": 1e-5,
    "accelerator_config": {"split_batches": False, "even_batches": True},
    "vllm_server_port": 8000,
    "hub_token": "<HUB_TOKEN>",
    "vllm_importance_sampling_clip_max": 2.0,
    "data_seed": None,
}

LEARNING = QUESTIONS[0]
REWARD_ONLY = Question("learning", "", "", "", "", (Panel("Reward", "mean", (Measure("reward", "Reward"),)),))


def run_of(rows=({"step": 4, "reward": 0.5},), path="run.jsonl", **changed):
    return Run(path, {**SETTINGS, **changed}, [dict(row) for row in rows])


def rewards(values, updates=4):
    """One row per rollout, beginning with the first."""
    return [{"step": updates * number, "reward": value} for number, value in enumerate(values, start=1)]


def write_run(directory, rows=({"step": 4, "reward": 0.5},), name="run.jsonl", **changed):
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(content) for content in ({"settings": {**SETTINGS, **changed}}, *rows)]
    place = directory / name
    content = ("\n".join(lines) + "\n").encode()
    place.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return place


def drawn_plots(runs, question=REWARD_ONLY):
    groups, _ = group_runs(runs)
    return plots_of(question, make_facets(groups), Curves(groups))


# Curves --------------------------------------------------------------------------------------------------------------


def test_steps_become_rollouts_and_gaps_are_left_out():
    rows = [{"step": 4, "reward": 1}, {"step": 8, "reward": None}, {"step": 10, "reward": math.nan}]
    rows += [{"step": 12, "other": 3.0}, {"step": 16, "reward": 0.25}, {"step": 18, "reward": "text"}]
    rollouts, values = points_of(run_of(rows), "reward")
    assert rollouts.tolist() == [1, 4]  # 4 / 4 and 16 / 4
    assert values.tolist() == [1, 0.25]
    assert points_of(run_of(rows, updates_per_rollout=None), "reward").rollouts.tolist() == [4, 16]  # steps
    assert points_of(run_of(rows, updates_per_rollout=0.5), "reward").rollouts.tolist() == [8, 32]
    assert points_of(run_of(rows), "absent").values.size == 0


def test_smoothing_by_hand():
    points = Points(np.arange(1.0, 6), np.array([1.0, 5, 3, 4, 2]))
    # Window 3: the neighbours on either side, and at the ends only one: (1+5)/2, (1+5+3)/3, (5+3+4)/3, (3+4+2)/3, 3.
    assert smooth(points, 3).values.tolist() == [3, 3, 4, 3, 3]
    assert smooth(points, 3, largest=True).values.tolist() == [5, 5, 5, 4, 4]
    assert smooth(points, 1).values.tolist() == points.values.tolist()
    rare = Points(np.array([4.0, 8, 12]), np.array([1.0, 2, 3]))  # further apart than the window reaches
    assert smooth(rare, 7).values.tolist() == [1, 2, 3]


@pytest.mark.parametrize("largest", [False, True])
def test_smoothing_against_a_loop(largest):
    generator = np.random.default_rng(0)
    rollouts = np.unique(generator.integers(0, 200, 80)) / 4  # uneven, and several to a rollout
    points = Points(rollouts, generator.normal(size=rollouts.size))
    smoothed = smooth(points, 9, largest).values
    for index, place in enumerate(rollouts):
        near = [value for at, value in zip(*points, strict=True) if abs(at - place) <= 4]
        assert smoothed[index] == pytest.approx(max(near) if largest else sum(near) / len(near), abs=1e-12)


@pytest.mark.parametrize("longest, window", [(1, 1), (39, 1), (40, 3), (120, 7), (500, 25), (1500, 75)])
def test_the_window_is_odd_and_a_twentieth(longest, window):
    assert smoothing_window(longest) == window


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
    # Logged every 50 rollouts: the last value alone.
    assert final_value(Points(np.array([50.0, 100]), np.array([1.0, 3]))) == 3
    assert final_value(Points(np.empty(0), np.empty(0))) is None


def test_confidence_interval_by_hand():
    # Standard deviation 1, error 1/√3, and 4.303 is the 97.5 % quantile of t with 2 degrees of freedom.
    assert estimate([1, 2, 3]) == pytest.approx((2, 4.303 / math.sqrt(3)))
    assert estimate([5]) == (5, None)
    assert estimate([]) is None


@pytest.mark.parametrize(
    "degrees, quantile", [(1, 12.706), (4, 2.776), (10, 2.228), (11, 2.201), (30, 2.042), (1000, 1.962)]
)
def test_student_t(degrees, quantile):
    assert student_t(degrees) == pytest.approx(quantile, abs=6e-4)


# Settings, groups and labels -----------------------------------------------------------------------------------------


def labels_of(*changes, base=SETTINGS):
    groups, _ = group_runs([Run("run.jsonl", {**base, **changed}, rewards([1.0])) for changed in changes])
    return [group.label for group in groups]


def test_labels_name_what_differs_and_nothing_else():
    assert labels_of({}) == ["INT8, acr"]  # a single group is called by what the method is about
    assert labels_of({"uaq_scale": 1.5}) == ["INT8, acr, UAQ 1.5"]
    assert labels_of({"objective": "tis"}, {"objective": "naive"}) == ["naive", "tis"]  # in the paper's order
    study = [
        {"rollout_quantization": "int3", "objective": "acr", "uaq_scale": 1.5},
        {"rollout_quantization": "int3", "objective": "acr"},
        {"rollout_quantization": None, "objective": "naive"},
    ]
    assert labels_of(*study) == ["BF16, naive", "INT3, acr", "INT3, acr, UAQ 1.5"]
    assert labels_of({"learning_rate": 1e-5}, {"learning_rate": 1e-6}, base=FULL) == [
        "learning rate 1e-6",
        "learning rate 1e-5",
    ]
    cap = "vllm_importance_sampling_clip_max"
    assert labels_of({cap: 5.0}, {cap: None}, base=FULL) == ["no cap", "C 5"]
    assert labels_of({"model": "a/base"}, {"model": "b/large"}, base=FULL) == ["base", "large"]


def test_what_does_not_change_training_makes_no_group():
    asides = [
        {"output_dir": "there", "run_name": "x", "logging_steps": 1, "vllm_server_port": 8001, "hub_token": "secret"},
        {"seed": 1, "date": "2026-11-20", "versions": {"torch": "2.13"}, "save_steps": 7, "arm": "x"},
        {"data_seed": 5, "hardware": "H200", "sync_check_interval": 1, "arm": "y", "date": "2026-11-21"},
    ]
    runs = [Run("run.jsonl", {**FULL, **changed}, rewards([1.0])) for changed in asides]
    flat = [flatten(run.settings) for run in runs]
    assert differing(flat[:2]) == []
    assert differing(flat) == ["arm"]  # nothing else tells the last two apart
    assert set_aside(flat) == ["output_dir", "run_name", "logging_steps", "vllm_server_port"]
    groups, notes = group_runs(runs[:2])
    assert [len(group.runs) for group in groups] == [2] and not notes


def test_an_arm_counts_only_where_no_setting_tells_runs_apart():
    flat = [{"arm": "a", "objective": "acr"}, {"arm": "b", "objective": "tis"}]
    assert differing(flat) == ["objective"]
    assert differing([*flat, {"arm": "c", "objective": "tis"}]) == ["objective", "arm"]


def test_nested_settings_numbers_and_what_is_missing():
    base = flatten(FULL)
    assert base["accelerator_config.split_batches"] is False
    nested = flatten({**FULL, "accelerator_config": {"split_batches": True, "even_batches": True}})
    assert differing([base, nested]) == ["accelerator_config.split_batches"]
    assert differing([{"uaq_scale": 1}, {"uaq_scale": 1.0}]) == []
    assert differing([{"beta": True}, {"beta": 1}]) == ["beta"]
    short = {"objective": "acr"}  # a shortened log knows few settings, and differs in none of the others
    assert differing([base, short, {"objective": "tis"}]) == ["objective"]
    assert "hub_token" not in base and "a.token" not in flatten({"a": {"token": "x", "eos_token": "y"}})
    assert flatten({"a": {"eos_token": "y"}}) == {"a.eos_token": "y"}


def test_common_settings_and_origins():
    one, two = flatten({**FULL, "date": "1", "beta": 0.1}), flatten({**FULL, "date": "2", "seed": 1})
    shared = common([one, two])
    assert shared["learning_rate"] == 1e-5 and shared["field_299"] is None
    assert not {"date", "seed", "beta"} & set(shared)
    assert origins([one, two, two]) == {"date": [("1", 1), ("2", 2)]}


def test_generic_settings_are_named_as_far_as_they_tell_runs_apart():
    # Twice the steps go with twice the batch: one name says it all; the table of differences has both.
    changes = [{"steps": 4, "batch": 64}, {"steps": 16, "batch": 16}, {"steps": 16, "batch": 16, "beta": 0.1}]
    for change in changes:
        change.setdefault("beta", 0.0)
    assert labels_of(*changes) == ["steps 4, beta 0", "steps 16, beta 0", "steps 16, beta 0.1"]
    groups, _ = group_runs([run_of(**change) for change in changes])
    table = differences_table(groups)
    assert table.header == ["Runs", "steps", "batch", "beta"]
    assert table.rows[0] == ["steps 4, beta 0", "4", "64", "0"]


def test_seeds_are_one_group_and_repetitions_are_not_seeds():
    runs = [run_of(rewards([value]), seed=seed) for seed, value in [(0, 1.0), (1, 2.0), (0, 9.0), (0, 8.0)]]
    groups, notes = group_runs(runs)
    assert [group.label for group in groups] == [
        "INT8, acr",
        "INT8, acr, repetition 2",
        "INT8, acr, repetition 3",
    ]
    assert [[run.rows[0]["reward"] for run in group.runs] for group in groups] == [[1, 2], [9], [8]]
    assert len(notes) == 2 and "more than one run with seed 0" in notes[0] and "“INT8, acr, repetition 2”" in notes[0]


def test_groups_that_words_do_not_tell_apart_are_numbered():
    assert labels_of({"model": "a/base"}, {"model": "b/base"}, base=FULL) == ["base", "base, variant 2"]


def study_runs():
    """Nineteen arms: BF16, and six objectives on each of three formats."""
    runs = [run_of(rollout_quantization=None, objective="naive")]
    for scheme in ("int3", "int4", "int8"):
        for objective in ("naive", "quantized_ratio", "decoupled", "tis", "acr"):
            runs.append(run_of(rollout_quantization=scheme, objective=objective))
        runs.append(run_of(rollout_quantization=scheme, objective="acr", uaq_scale=1.5))
    return runs


def test_many_groups_are_split_by_a_setting_with_the_baseline_in_every_part():
    facets = make_facets(group_runs(study_runs())[0])
    assert [facet.title for facet in facets] == ["INT3", "INT4", "INT8"]
    for facet in facets:
        assert [entry.label for entry in facet.entries] == [
            "BF16, naive", "naive", "quantized_ratio", "decoupled", "tis", "acr", "acr, UAQ 1.5",
        ]  # fmt: skip
        assert [entry.style for entry in facet.entries] == list(range(7))


def test_groups_that_no_setting_splits_come_eight_at_a_time_and_no_style_twice():
    groups, _ = group_runs([run_of(learning_rate=1e-6 * number) for number in range(1, 21)])
    facets = make_facets(groups)
    assert [len(facet.entries) for facet in facets] == [8, 8, 4]
    assert [facet.title for facet in facets] == ["part 1", "part 2", "part 3"]
    styles = [entry.style for facet in facets for entry in facet.entries]
    looks = {(COLORS[s % len(COLORS)], MARKERS[s % len(MARKERS)], DASHES[s % len(DASHES)]) for s in styles}
    assert len(looks) == 20


def test_eight_groups_look_different_without_colour():
    assert len({(MARKERS[s % len(MARKERS)], DASHES[s % len(DASHES)]) for s in range(MOST_PER_PLOT + 1)}) == 9
    assert len(make_facets(group_runs([run_of(learning_rate=float(n)) for n in range(8)])[0])) == 1


# Plots ---------------------------------------------------------------------------------------------------------------


def test_a_plot_shows_means_and_bands():
    runs = [
        run_of(rewards([0.1, 0.3, 0.5]), seed=0),
        run_of(rewards([0.3, 0.5, 0.9]), seed=1),
        run_of(rewards([0.2, 0.2]), objective="tis"),
    ]
    (plot,) = drawn_plots(runs)
    axes = draw_plot(plot).axes[0]
    tis, acr = axes.lines  # in the paper's order
    assert acr.get_xdata().tolist() == [1, 2, 3]
    assert acr.get_ydata() == pytest.approx([0.2, 0.4, 0.7])
    assert (tis.get_xdata().tolist(), tis.get_ydata().tolist()) == ([1, 2], [0.2, 0.2])
    (band,) = axes.collections  # of the only group with several seeds
    corners = {(x, round(y, 9)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(1, 0.1), (2, 0.3), (3, 0.5), (1, 0.3), (2, 0.5), (3, 0.9)}
    assert tis.get_color() != acr.get_color() and tis.get_marker() != acr.get_marker()
    low, high = axes.get_ylim()
    assert low < 0.1 and high > 0.9


def test_the_legend_says_how_many_seeds():
    runs = [run_of(seed=0), run_of(seed=1), run_of(objective="tis")]
    (plot,) = drawn_plots(runs)
    (legend,) = draw_plot(plot).legends
    assert [text.get_text() for text in legend.get_texts()] == ["tis (1 seed)", "acr (2 seeds)"]
    (plot,) = drawn_plots(runs[1:])
    (legend,) = draw_plot(plot).legends
    assert [text.get_text() for text in legend.get_texts()] == ["tis", "acr"]
    (plot,) = drawn_plots(runs[:1])
    assert not draw_plot(plot).legends  # the title says it


def test_long_runs_are_smoothed_and_the_raw_values_shown_behind():
    values = [float(number % 2) for number in range(40)]  # 0 1 0 1 ...
    (plot,) = drawn_plots([run_of(rewards(values))])
    figure = draw_plot(plot)
    raw, line = figure.axes[0].lines
    assert raw.get_ydata().tolist() == values and raw.get_alpha() < 0.5
    assert line.get_ydata()[:3] == pytest.approx([1 / 2, 1 / 3, 2 / 3])  # window 3, cut at the end
    assert "mean · mean of 3 rollouts" in [text.get_text() for text in figure.texts]
    assert line.get_markevery() == (0, 6)  # 40 / 7, rounded
    several = [run_of(rewards(values), objective=name) for name in ("naive", "tis", "acr")]
    (plot,) = drawn_plots(several)
    assert len(draw_plot(plot).axes[0].lines) == 3  # no room behind them


def test_the_largest_ratio_is_smoothed_by_the_largest():
    rows = [{"step": 4 * n, "mismatch/ratio_max": 50.0 if n == 20 else 2.0} for n in range(1, 41)]
    (question,) = [question for question in QUESTIONS if question.name == "ratio"]
    (plot,) = drawn_plots([run_of(rows)], question)
    figure = draw_plot(plot)
    assert figure.axes[0].lines[-1].get_ydata()[17:22].tolist() == [2, 50, 50, 50, 2]  # rollouts 18 to 22
    assert "ρ · largest of 3 rollouts" in [text.get_text() for text in figure.texts]


def test_shares_start_at_zero_and_a_bad_critic_does_not_hide_a_good_one():
    rows = [{"step": 4 * n, "clip_ratio/region_mean": 0.02 + n / 100} for n in range(3)]
    (plot,) = drawn_plots([run_of(rows)], QUESTIONS[1])
    assert plot.limits == pytest.approx((0, 0.042))  # and a twentieth above 4 %
    (critic,) = [question for question in QUESTIONS if question.name == "critic"]
    rows = [{"step": 4 * n, "critic/explained_variance": value} for n, value in enumerate((-40.0, -3.0, 0.5))]
    (plot,) = drawn_plots([run_of(rows)], critic)
    assert plot.limits[0] == -0.5 and plot.limits[1] > 0.5


def test_a_dollar_sign_is_no_formula():
    runs = [run_of(objective="$a^{$"), run_of(objective="_hidden")]
    (plot,) = drawn_plots(runs)
    figure = draw_plot(plot._replace(title="$b^{$"))
    assert to_png(figure).startswith(b"\x89PNG")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["$a^{$", "_hidden"]


def test_seeds_that_end_early_and_metrics_that_some_runs_lack():
    runs = [run_of(rewards([1.0, 2, 3]), seed=0), run_of(rewards([3.0]), seed=1)]
    runs.append(run_of([{"step": 4, "other": 1.0}], objective="tis"))
    (plot,) = drawn_plots(runs)
    (line,) = draw_plot(plot).axes[0].lines
    assert line.get_ydata().tolist() == [2, 2, 3]
    assert drawn_plots(runs, QUESTIONS[1]) == []


def test_logarithmic_axes_leave_out_what_is_not_above_zero():
    panel = Panel("KL", "nats", (Measure("kl", "KL"),), logarithmic=True)
    question = Question("kl", "", "", "", "", (panel,))
    rows = [{"step": 4, "kl": 0.0}, {"step": 8, "kl": 0.02}, {"step": 12, "kl": -1.0}, {"step": 16, "kl": 0.03}]
    (plot,) = drawn_plots([run_of(rows)], question)
    axes = draw_plot(plot).axes[0]
    assert axes.get_yscale() == "log"
    assert axes.lines[0].get_ydata().tolist() == [0.02, 0.03]
    assert 0 < axes.get_ylim()[0] < 0.02 and axes.get_ylim()[1] > 0.03
    assert drawn_plots([run_of([{"step": 4, "kl": 0.0}])], question) == []


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("value", [3.4e-7, 0.35, 1.0, 99.0, 1.2e5])
def test_a_single_row_is_a_point_between_ticks(value, logarithmic):
    panel = Panel("m", "unit", (Measure("m", "M"),), logarithmic=logarithmic)
    (plot,) = drawn_plots([run_of([{"step": 4, "m": value}])], Question("m", "", "", "", "", (panel,)))
    figure = draw_plot(plot)
    axes = figure.axes[0]
    assert axes.lines[0].get_marker() == "o" and axes.lines[0].get_markevery() == 1
    low, high = axes.get_ylim()
    assert (low, high) == pytest.approx(plot.limits)  # matplotlib did not have to widen them
    assert low < value < high
    assert any(low <= place <= high for place in axes.get_yticks())


def test_zero_everywhere_still_has_an_axis():
    (plot,) = drawn_plots([run_of([{"step": 4, "clip_ratio/region_mean": 0.0}])], QUESTIONS[1])
    low, high = draw_plot(plot).axes[0].get_ylim()
    assert low == 0 < high


def test_one_group_shares_a_plot_and_several_share_a_scale():
    rows = [{"step": 4, "weights/normalized_update": 1e-6, "weights/normalized_quantization_error": 1e-4}]
    (weights,) = [question for question in QUESTIONS if question.name == "weights"]
    (plot,) = drawn_plots([run_of(rows)], weights)
    assert [line.label for line in plot.lines] == ["Normalised update", "Quantization error"]
    update, error = drawn_plots([run_of(rows), run_of(rows, objective="tis")], weights)
    assert (update.title, error.title) == ("Normalised update", "Quantization error")
    assert [line.label for line in update.lines] == ["tis", "acr"]
    assert update.limits == error.limits
    assert update.limits[0] < 1e-6 and update.limits[1] > 1e-4


def test_facets_share_a_scale():
    runs = study_runs()
    for number, run in enumerate(runs):
        run.rows[0]["reward"] = float(number)
    plots = drawn_plots(runs)
    assert [plot.title for plot in plots] == ["Reward: INT3", "Reward: INT4", "Reward: INT8"]
    assert len({plot.limits for plot in plots}) == 1
    assert [line.curve.mean[0] for line in plots[0].lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line.curve.mean[0] for line in plots[2].lines] == [0, 13, 14, 15, 16, 17, 18]


# Seconds -------------------------------------------------------------------------------------------------------------

SECONDS = {
    "time/generate_s": 10.0,
    "time/quantize_s": 1.0,
    "time/sync_s": 3.0,
    "time/logps_s": 2.0,
    "time/update_s": 1.5,
    "step_time": 5.5,
}


def test_seconds_of_a_rollout_by_hand():
    warm_up = dict.fromkeys(SECONDS, 100.0)
    rows = [{"step": 4, **warm_up}, {"step": 8, **SECONDS}, {"step": 12, **SECONDS}]
    split = seconds_per_rollout(run_of(rows))
    # Sending is 3 - 1; updates are 4 x 1.5; the steps took 4 x 5.5 = 22 s, of which 10 + 1 + 2 + 2 + 6 = 21 are known.
    expected = {
        "generation": 10,
        "gathering, rounding": 1,
        "sending": 2,
        "log-probabilities": 2,
        "updates": 6,
        "other": 1,
    }
    assert split == pytest.approx(expected)
    assert seconds_per_rollout(run_of(rows[:1]))["generation"] == 100  # there is no other
    assert seconds_per_rollout(run_of()) == {}
    # A critic's update is in the update, but not in the step: 22 - (21 + 3 - 4 x 0.5).
    critic = {**SECONDS, "time/values_s": 3.0, "time/critic_update_s": 0.5}
    assert seconds_per_rollout(run_of([{"step": 4, **critic}]))["other"] == pytest.approx(0)
    assert seconds_per_rollout(run_of([{"step": 4, **critic, "step_time": 7.0}]))["other"] == pytest.approx(6)


def test_bars_are_stacked_means():
    runs = [
        run_of([{"step": 4, **SECONDS}], seed=0),
        run_of([{"step": 4, **SECONDS, "time/generate_s": 20.0}], seed=1),
    ]
    runs.append(run_of(objective="tis"))  # logged no times
    assert mean_seconds(runs[:2])["generation"] == 15
    (bars,) = bars_of(make_facets(group_runs(runs)[0]))
    assert bars.labels == ["acr"]
    figure = draw_bars(bars)
    patches = figure.axes[0].patches
    assert [patch.get_width() for patch in patches][:2] == [15, 1]
    ends = [patch.get_x() + patch.get_width() for patch in patches]
    assert [patch.get_x() for patch in patches] == pytest.approx([0, *ends[:-1]])
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "acr",
        " 26.5 s",
    ]  # (22 + 31) / 2, "other" being 1 and 0


# Tables --------------------------------------------------------------------------------------------------------------


def test_summary_by_hand():
    def row(reward, ratio):
        return {
            "reward": reward,
            "mismatch/ratio_max": ratio,
            "mismatch/kl_k3": 4.5e-5,
            "clip_ratio/region_mean": 0.0123,
        }

    runs = [
        run_of([{"step": 4, **row(0.5, 900.0)}, {"step": 88, **row(0.6, 2.0)}], seed=0),
        run_of([{"step": 4, **row(0.5, 5.0)}, {"step": 88, **row(0.8, 3.0)}], seed=1),
        run_of([{"step": 4, "reward": 0.25}], objective="tis"),
    ]
    table = summary_table(group_runs(runs)[0], [Measure("eval_x", "never logged")])
    assert table.header == [
        "Runs",
        "Seeds",
        "Rollouts",
        "Reward of the rollouts",
        "KL, nats",
        "Largest ρ",
        "Clipped, %",
    ]
    # Rollout 22 is the only one of the last 20. Mean of 0.6 and 0.8; their standard deviation is 0.1 √2, so the error
    # of the mean is 0.1, and t for one degree of freedom 12.706. The largest ratio is that of the whole run.
    assert table.rows == [
        ["tis", "1", "1", "0.250", "–", "–", "–"],
        ["acr", "2", "22", "0.700 ± 1.271", "(4.50 ± 0.00) × 10⁻⁵", "900", "1.23 ± 0.00"],
    ]


def test_a_column_has_the_decimals_that_suit_most_of_it():
    runs = [run_of(rewards([value]), objective=name) for name, value in [("a", 12.34), ("b", 0.1234), ("c", 0.5678)]]
    rows = summary_table(group_runs(runs)[0], []).rows
    assert [row[3] for row in rows] == ["12.340", "0.123", "0.568"]


def test_lengths_of_seeds_that_differ():
    runs = [run_of(rewards([1.0] * 3), seed=0), run_of(rewards([1.0] * 5), seed=1)]
    assert summary_table(group_runs(runs)[0], []).rows[0][2] == "3 to 5"


@pytest.mark.parametrize(
    "value, error, text",
    [
        (0.84213, 0.0112, "0.842 ± 0.011"),
        (0.84213, None, "0.842"),
        (4.512e-5, 1.2e-6, "(4.51 ± 0.12) × 10⁻⁵"),
        (123456.0, None, "1.23 × 10⁵"),
        (-0.5, 0.25, "−0.50 ± 0.25"),
        (0.0, None, "0"),
        (0.0, 0.0, "0 ± 0"),
        (1204.4, 31.0, "1,204 ± 31"),
        (9.996, None, "10.00"),
    ],
)
def test_numbers_with_errors(value, error, text):
    assert with_error(value, error) == text


def test_numbers_without_errors():
    assert [numeral(value) for value in (0.5, 120.0, 0.0312, 4.5e-5, 1204.0)] == [
        "0.5", "120", "0.0312", "4.5 × 10⁻⁵", "1,200",
    ]  # fmt: skip
    assert percentage(0.01234) == "1.2 %"
    assert [tick(value) for value in (0, 0.25, -5, 2e-5, 1e-4, 1e5)] == ["0", "0.25", "−5", "2·10⁻⁵", "10⁻⁴", "10⁵"]
    assert tick(0.01, powers=True) == "10⁻²"


def test_held_out_scores_are_what_evaluation_adds():
    logged = ["reward", "entropy", "eval_gsm8k/avg@1", "eval_runtime", "eval_steps_per_second", "eval_loss"]
    logged += [
        "eval_entropy",
        "eval_reward",
        "rewards/f/mean",
        "eval_rewards/f/mean",
        "rewards/f/std",
        "eval_rewards/f/std",
    ]
    logged += ["eval_aime24/seconds", "eval_aime24/actor_tokens", "eval_aime24/actor_finished"]
    assert [score.metric for score in held_out_scores(logged)] == [
        "eval_gsm8k/avg@1",
        "eval_reward",
        "eval_rewards/f/mean",
    ]
    held_out = ask(logged)[0].panels[1]
    assert held_out.measures[-3].label == "gsm8k/avg@1, held out"
    assert ask([])[0] == LEARNING


# The page ------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would fetch, the headings, the images, and whether all elements are closed in order."""

    VOID = {"meta", "img", "br", "link", "hr", "input"}

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def visible(self):
        return " ".join(" ".join(self.text).split())


ROWS = [{"step": 4 * n, "reward": 0.1 * n, "mismatch/kl_k3": 1e-4 * n, **SECONDS} for n in range(1, 4)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    nasty = {"model": '<script>alert("x")</script> & $a^{$', "extra": {"quote\"'": "<b>"}, "date": "2026-11-21"}
    write_run(directory / "one", ROWS, **nasty)
    write_run(directory / "two", ROWS, seed=1, **nasty)
    write_run(directory / "three", ROWS[:2], objective="<i>tis</i> $x_{$", **nasty)
    output = directory / "new" / "page.html"
    report = write_report([directory / "one", directory / "two", directory / "three"], output)
    return SimpleNamespace(report=report, text=output.read_text(encoding="utf-8"), runs=directory)


def test_the_page_needs_no_other_file(written):
    page = Page(written.text)
    sources = [attributes["src"] for attributes in page.all("img")]
    assert len(sources) == len(written.report.pictures) == 3  # reward, KL, seconds
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not page.all("link") and not page.all("script") and not page.all("iframe")
    assert not [attributes for _, attributes in page.elements if "href" in attributes or "srcset" in attributes]
    assert "http" not in re.sub(r"base64,[\w+/=]+", "", written.text) and "url(" not in written.text


def test_the_pictures_beside_the_page_are_those_in_it(written):
    sources = [attributes["src"] for attributes in Page(written.text).all("img")]
    folder = written.report.page.parent / "page-pictures"
    assert [path.name for path in written.report.pictures] == [
        "01-learning-reward.png",
        "02-mismatch-mismatch-kl_k3.png",
        "03-seconds-of-a-rollout.png",
    ]
    assert sorted(folder.iterdir()) == sorted(written.report.pictures)
    for source, path in zip(sources, written.report.pictures, strict=True):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") and base64.b64decode(source.split(",")[1]) == content


def test_the_page_can_be_read_by_anyone(written):
    page = Page(written.text)
    assert page.all("html") == [{"lang": "en"}] and len(page.all("h1")) == 1
    assert written.text.startswith("<!DOCTYPE html>") and page.all("title") == [{}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    for image in page.all("img"):
        assert int(image["width"]) == 800 and int(image["height"]) > 400
    reward = page.all("img")[0]["alt"]
    # At rollout 3 both seeds of acr stand at 0.3; tis ended at rollout 2.
    assert reward.endswith("At the end: acr 0.3; <i>tis</i> $x_{$ 0.2.")
    assert len(page.all("section")) == len(page.all("h2"))


def test_settings_are_shown_as_text(written):
    page = Page(written.text)
    assert not page.all("script") and not page.all("b") and not page.all("i")
    assert '<script>alert("x")</script> & $a^{$' in page.visible
    assert "<i>tis</i> $x_{$" in page.visible and "extra.quote\"' <b>" in page.visible


def test_the_page_says_what_was_averaged_and_what_is_missing(written):
    text = Page(written.text).visible
    assert "3 runs in 2 groups" in text
    assert "A rollout is 4 optimizer updates." in text
    assert "the band reaches from the lowest seed to the highest" in text
    assert "Nothing is smoothed." in text
    assert "date: 2026-11-21" in text
    assert "Logged as reward ." in text and "expected_accuracy" not in text
    missing = re.search(r"Not logged in these runs: (.*?)\.", text).group(1).split(", ")
    assert {"clipping", "ratio", "weights", "acr", "critic", "dynamic sampling"} <= set(missing)
    assert not {"learning", "mismatch", "seconds"} & set(missing)


def test_the_same_runs_give_the_same_bytes(written, tmp_path):
    paths = [written.runs / name for name in ("one", "two", "three")]
    again = write_report(paths, tmp_path / "page.html")
    assert again.page.read_bytes() == written.report.page.read_bytes()


def test_what_several_seeds_and_smoothing_are_told_only_where_they_are(tmp_path):
    write_run(tmp_path / "run", rewards([0.5] * 40), updates_per_rollout=None)
    text = Page(write_report([tmp_path / "run"], tmp_path / "page.html").page.read_text()).visible
    assert "lowest seed" not in text and "confidence interval" not in text and "In which settings" not in text
    assert "smoothed by itself, over 9 rollouts" in text  # 160 steps that count as rollouts
    assert "1 run of 1 did not record updates_per_rollout" in text


def test_zipped_logs_and_killed_runs(tmp_path):
    zipped = write_run(tmp_path / "zipped", rewards([0.1, 0.2]), name="any-name.jsonl.gz")
    killed = write_run(tmp_path / "killed", rewards([0.3, 0.4]), seed=1)
    with open(killed, "a") as file:
        file.write('{"step": 12, "rew')
    runs, notes = load_runs([zipped, killed, tmp_path / "killed"])
    assert [[row["reward"] for row in run.rows] for run in runs] == [[0.1, 0.2], [0.3, 0.4]]
    assert notes == [f"{tmp_path / 'killed'} was given more than once and is counted once."]
    again = write_run(tmp_path / "again", rewards([0.5]), seed=1)
    (note,) = write_report([zipped, killed, again], tmp_path / "page.html").notes
    assert "repetition 2" in note


def test_runs_without_rows_are_left_out_and_named(tmp_path):
    write_run(tmp_path / "good", rewards([0.5]))
    write_run(tmp_path / "new", [])
    report = write_report([tmp_path / "good", tmp_path / "new"], tmp_path / "page.html")
    assert report.notes == (f"{tmp_path / 'new'} is left out: it has logged nothing yet.",)
    assert report.notes[0] in Page(report.page.read_text()).visible
    with pytest.raises(ValueError, match=r"None of the runs given .*new\) has logged anything.*wait for it"):
        write_report([tmp_path / "new"], tmp_path / "page.html")


def test_a_new_report_takes_away_the_pictures_of_the_old_one(tmp_path):
    write_run(tmp_path / "run", ROWS)
    first = write_report([tmp_path / "run"], tmp_path / "page.html")
    folder = first.pictures[0].parent
    (folder / "mine.png").write_bytes(b"not the report's")
    write_run(tmp_path / "run", rewards([0.5]))
    second = write_report([tmp_path / "run"], tmp_path / "page.html")
    assert sorted(path.name for path in folder.iterdir()) == ["01-learning-reward.png", "mine.png"]
    assert second.pictures == (folder / "01-learning-reward.png",)


def test_pictures_of_facets_that_sound_alike_have_files_of_their_own():
    assert writing._file_names(1, ["a +", "a -", "b", "模", "型"]) == [
        "01-a.png", "01-a-again1.png", "01-b.png", "01-.png", "01--again1.png",
    ]  # fmt: skip


# What can go wrong ---------------------------------------------------------------------------------------------------


def test_errors_name_what_was_given_and_the_way_out(tmp_path):
    with pytest.raises(ValueError, match="No run was given: name the output_dir"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(FileNotFoundError, match="give the output_dir of a run"):
        write_report([tmp_path / "absent"], tmp_path / "page.html")
    log = write_run(tmp_path / "run")
    with pytest.raises(IsADirectoryError, match="which is a directory: name a file in it"):
        write_report([log], tmp_path)
    with pytest.raises(OSError, match=r"cannot be written to .*run\.jsonl/page\.html \(.+\): choose a directory"):
        write_report([log], log / "page.html")
    before = log.read_bytes()
    with pytest.raises(ValueError, match="would overwrite .*run.jsonl, the log of one of its runs"):
        write_report([tmp_path / "run"], log)
    assert log.read_bytes() == before and not list(tmp_path.rglob("*.png"))


def test_a_missing_library_is_named_with_the_way_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "find_spec", lambda name: None if name == "jinja2" else object())
    with pytest.raises(ImportError, match=r"needs jinja2, .*pip install trl-qurl\[report\]"):
        write_report([tmp_path], tmp_path / "page.html")


def test_a_report_that_fails_leaves_the_old_page(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    page = tmp_path / "page.html"
    page.write_text("old")

    def fail(content):
        raise RuntimeError

    monkeypatch.setattr(writing, "render_page", fail)
    with pytest.raises(RuntimeError):
        write_report([tmp_path / "run"], page)
    assert page.read_text() == "old"


def test_a_report_needs_neither_torch_nor_a_display(tmp_path):
    write_run(tmp_path / "run")
    script = (
        "import sys; from pathlib import Path; from trl_qurl.lab.report.write import write_report\n"
        "heavy = {'torch', 'transformers', 'trl', 'vllm', 'matplotlib', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "write_report([Path(sys.argv[1])], Path(sys.argv[2]))\n"
        "heavy = {'torch', 'transformers', 'trl', 'vllm', 'matplotlib.pyplot'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, tmp_path / "run", tmp_path / "page.html"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
