"""What `trl-qurl report` tabulates and draws, against numbers worked out by hand."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from trl_qurl.cli import main
from trl_qurl.lab.curves import Points, draw_curve, final_value, points_of, smooth
from trl_qurl.lab.report import Seconds, group_runs, seconds_per_rollout
from trl_qurl.trainers.run_log import Run

SETTINGS = {"rollout_quantization": "int8", "objective": "acr", "seed": 0, "updates_per_rollout": 4}


def run_of(rows=(), **changed):
    return Run("run.jsonl", {**SETTINGS, **changed}, [dict(row) for row in rows])


def write_run(directory, rows, **changed):
    directory.mkdir()
    lines = [{"settings": SETTINGS | changed}, *rows]
    (directory / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(directory)


def rewards(values):
    """One row per rollout, beginning with the first."""
    return [{"step": 4 * number, "reward": value} for number, value in enumerate(values, start=1)]


# Metrics over rollouts -----------------------------------------------------------------------------------------------


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
    assert smooth(points, 3, np.max).values.tolist() == [5, 5, 5, 4, 4]
    assert smooth(points, 1).values.tolist() == points.values.tolist()
    rare = Points(np.array([4.0, 8, 12]), np.array([1.0, 2, 3]))  # further apart than the window reaches
    assert smooth(rare, 7).values.tolist() == [1, 2, 3]


def test_the_end_of_training_is_its_last_twenty_rollouts():
    assert final_value(Points(np.arange(1.0, 31), np.arange(1.0, 31))) == 20.5  # the mean of 11 to 30
    assert final_value(Points(np.array([50.0, 100]), np.array([1.0, 3]))) == 3  # logged every 50 rollouts
    assert final_value(Points(np.empty(0), np.empty(0))) is None


def test_seconds_by_hand():
    seconds = {"time/generate_s": 10.0, "time/quantize_s": 1.0, "time/sync_s": 3.0, "time/logps_s": 1.5}
    seconds |= {"time/update_s": 1.25, "step_time": 5.5}
    rows = [{"step": 4, **seconds, "time/generate_s": 100.0}, {"step": 8, **seconds}]
    # The first rollout is left out. The parts are 10 + 3 + 1.5 + 4 x 1.25 = 19.5; four steps of 5.5 are 22.
    assert seconds_per_rollout(run_of(rows)) == Seconds(22, 10, 3)
    assert seconds_per_rollout(run_of(rows[:1])).generation == 100  # there is no other
    # Slow optimizers: 10 + 3 + 1.5 + 4 x 5 = 34.5.
    assert seconds_per_rollout(run_of([{"step": 4, **seconds, "time/update_s": 5.0}])).total == 34.5
    # Logged every step: of the first rollout's steps none counts.
    steps = [{"step": step, "step_time": 9.0 if step <= 4 else 1.0} for step in range(1, 9)]
    assert seconds_per_rollout(run_of(steps)).total == 4


# Groups --------------------------------------------------------------------------------------------------------------


def labels_of(*changes):
    return list(group_runs([run_of(**changed) for changed in changes]))


def test_labels_name_what_differs_and_nothing_else():
    assert labels_of({}) == ["INT8, acr"]  # a single group is named by what the method is about
    assert labels_of({"objective": "tis"}, {"objective": "naive"}) == ["tis", "naive"]  # in the order given
    both = labels_of({"beta": 0.1, "objective": "tis"}, {"beta": 0.0, "rollout_quantization": None})
    assert both == ["INT8, tis, beta 0.1", "16 bits, acr, beta 0.0"]
    assert labels_of({"model": "a/base"}, {"model": "b/base"}) == ["a/base", "b/base"]
    assert labels_of({"kwargs": {"a": 1}}, {"kwargs": {"a": 2}}) == ["kwargs {'a': 1}", "kwargs {'a': 2}"]
    # A setting of one run alone, as after an upgrade, tells nothing.
    assert labels_of({"seed": 1}, {"new": 1, "seed": 2}) == ["INT8, acr"]


def test_what_does_not_change_training_makes_no_group():
    one = {"output_dir": "here", "run_name": "x", "logging_steps": 1, "vllm_server_port": 8001, "seed": 1}
    other = {"output_dir": "there", "run_name": "y", "logging_steps": 4, "vllm_server_port": 8002, "seed": 2}
    assert [len(runs) for runs in group_runs([run_of(**one), run_of(**other)]).values()] == [2]


def test_seeds_are_one_group_and_repetitions_are_not_seeds():
    runs = [run_of(rewards([value]), seed=seed) for seed, value in [(0, 1.0), (1, 2.0), (0, 9.0), (0, 8.0)]]
    groups = {label: [run.rows[0]["reward"] for run in group] for label, group in group_runs(runs).items()}
    assert groups == {"INT8, acr": [1, 2], "INT8, acr #2": [9], "INT8, acr #3": [8]}


# Drawing -------------------------------------------------------------------------------------------------------------


def test_a_curve_is_the_mean_over_seeds_with_their_range():
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    seeds = [
        run_of(rewards([0.1, 0.3, 0.5])),
        run_of([{"step": 4, "reward": 0.3}, {"step": 12, "reward": 0.7}]),  # on the way, 0.5 at rollout 2
        run_of(rewards([0.2, 0.4])),  # ends earlier
        run_of([{"step": 4}]),  # did not log it
    ]
    draw_curve(axes, 0, "acr", seeds, "reward")
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [1, 2, 3]
    assert line.get_ydata() == pytest.approx([0.2, 0.4, 0.6])  # (.1+.3+.2)/3, (.3+.5+.4)/3, (.5+.7)/2
    (band,) = axes.collections
    corners = {(x, round(y, 9)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(1, 0.1), (2, 0.3), (3, 0.5), (1, 0.3), (2, 0.5), (3, 0.7)}
    assert all(tick == round(tick) for tick in axes.get_xticks()), "there is no half a rollout"


def test_long_runs_are_smoothed_and_maxima_by_their_maximum():
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    rows = [{"step": 4 * n, "reward": float(n % 2), "mismatch/ratio_max": float(n)} for n in range(1, 61)]
    draw_curve(axes, 0, "", [run_of(rows)], "reward")
    draw_curve(axes, 1, "", [run_of(rows)], "mismatch/ratio_max")
    mean, largest = (line.get_ydata().tolist() for line in axes.lines)
    assert mean[1:3] == pytest.approx([2 / 3, 1 / 3])  # 60 / 20 rollouts: 1, 0, 1 and 0, 1, 0
    assert largest[:3] == [2, 3, 4] and largest[-1] == 60
    assert axes.lines[0].get_color() != axes.lines[1].get_color()


# The command ---------------------------------------------------------------------------------------------------------


def test_the_table_and_the_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "150")
    scores = {"eval_sums/actor_avg@1": 0.25, "eval_sums/actor_tokens": 9.0}
    first = {"step": 4, "reward": 0.1, "mismatch/ratio_max": 900.0}
    last = {"step": 88, "reward": 0.6, "mismatch/ratio_max": 2.0, "mismatch/kl_k3": 4.5e-5}
    runs = [
        write_run(tmp_path / "a", [first, last | {"step_time": 2.0, "time/generate_s": 3.0, "time/sync_s": 0.5}]),
        write_run(tmp_path / "b", [first | {"mismatch/ratio_max": 300.0}, last | {"reward": 0.8}], seed=1),
        write_run(tmp_path / "c", [{"step": 4, "reward": 0.0, **scores}], objective="tis"),
    ]
    picture = tmp_path / "runs.png"
    assert main(["report", *runs, "-o", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    acr, tis = ([*line.split()] for line in lines if line.split()[:1] in (["acr"], ["tis"]))
    # Only the last row is among the last 20 rollouts. Of 0.6 and 0.8: mean 0.7, standard deviation 0.1 √2. The mean
    # of 900 and 300 is 600. Four updates of 2 seconds, logged by one seed only.
    assert acr == ["acr", "2", "–", "0.7", "±", "0.1", "4.5e-05", "600", "8", "3", "0.5"]
    assert tis == ["tis", "1", "0.25", "0", "–", "–", "–", "–", "–"]
    assert any("eval sums/actor avg@1" in line for line in lines) and not any("tokens" in line for line in lines)
    assert lines[-1] == f"Picture: {picture}" and picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_an_error(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run, empty = write_run(tmp_path / "run", rewards([0.5])), write_run(tmp_path / "empty", [])
    for arguments, message in {
        (str(tmp_path / "absent"),): "does not exist: pass the output_dir of a run",
        (run, empty): "empty/run.jsonl has no rows yet: leave this run out",
        (run, "-o", f"{run}/run.jsonl"): "Format 'jsonl' is not supported (supported formats: ",
        (run, "-o", str(tmp_path / "absent" / "runs.png")): "No such file or directory",
        (run, "-o", str(tmp_path)): "Is a directory",
    }.items():
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_missing_library_is_named_with_its_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trl_qurl.lab.packages.find_spec", lambda name: None if name == "rich" else name)
    assert main(["report", str(tmp_path)]) == 2
    assert "A report needs rich: run `pip install 'trl-qurl[report]'`." in capsys.readouterr().err


def test_a_report_needs_no_torch(tmp_path):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", rewards([0.5]))
    code = "import sys; from trl_qurl.cli import main\n"
    code += f"assert main(['report', {run!r}, '-o', {str(tmp_path / 'runs.svg')!r}]) == 0\n"
    code += "assert not {'torch', 'transformers', 'trl', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "runs.svg").stat().st_size
