"""The table and the picture of `trl-qurl report`, against numbers worked out by hand."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trl_qurl.cli import main
from trl_qurl.lab.curves import COLORS, Panel, Points, draw, final_value, points_of, smooth
from trl_qurl.lab.runs import Run
from trl_qurl.lab.update_size import ROUNDING, UPDATE


def write_run(directory, rows):
    directory.mkdir(parents=True)
    lines = [{"settings": {"updates_per_rollout": 4}}, *rows]
    (directory / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(directory)


def points(rollouts, values):
    return Points(np.array(rollouts, dtype=float), np.array(values, dtype=float))


def test_metrics_over_rollouts():
    rows = [
        {"step": 1, "reward": 1},
        {"step": 8, "reward": None},
        {"step": 12, "other": 3.0},
        {"step": 16, "reward": 0.25},
        {"step": 18, "reward": "text"},
    ]
    rollouts, values = points_of(Run(Path(), {"updates_per_rollout": 4}, rows), "reward")
    assert rollouts.tolist() == [1, 4]  # 1 / 4, rounded up, and 16 / 4
    assert values.tolist() == [1, 0.25]
    rollouts, _ = points_of(Run(Path(), {}, rows), "reward")
    assert rollouts.tolist() == [1, 16]  # steps


def test_means():
    # Two neighbors on either side: (1 + 5 + 3) / 3, (1 + 5 + 3 + 4) / 4, and the last is alone.
    line = points([1, 2, 3, 4, 9], [1, 5, 3, 4, 2])
    assert smooth(line).values.tolist() == [3, 3.25, 3.25, 4, 2]
    every = np.arange(1.0, 101)
    assert final_value(Points(every, every)) == 90.5  # of 81 to 100
    assert final_value(Points(every[:10], every[:10])) == 8  # of a short run, from 6 to 10
    assert final_value(points([50, 100], [1, 3])) == 3  # logged every 50 rollouts
    assert final_value(points([], [])) is None


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn."""
    figure, drawn = pytest.importorskip("matplotlib.figure").Figure, []
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: drawn.append(self))
    return drawn


def test_panels_of_the_picture(tmp_path, drawn):
    runs = {
        "two": [points([1, 9], [0.001, 1]), points([1, 9], [0.003, 3])],
        "none": [points([], [])],
        "one": [points([9], [0.5])],
    }
    first = Panel("KL", "nats", runs, logarithmic=True, x="hour", limit=0.005)
    draw([first, Panel("", "", {})], tmp_path)
    decades = Panel("", "", {"": [points([1, 9], [1e-6, 1])]}, logarithmic=True)
    draw([decades, Panel("", "", {}), Panel("", "", {})], tmp_path)
    figure, odd = drawn
    kl, below = figure.axes
    assert (kl.get_xlabel(), kl.get_ylabel(), kl.get_title("left")) == ("hour", "nats", "KL")
    [band] = kl.collections
    assert (band.get_datalim(kl.transData).y0, band.get_datalim(kl.transData).y1) == (0.001, 3)
    mean, point, limit = kl.lines
    assert set(limit.get_ydata()) == {0.005}
    assert mean.get_ydata().tolist() == [0.002, 2]
    assert (mean.get_marker(), point.get_marker()) == ("", "o")
    assert mean.get_color() != point.get_color()
    assert mean.get_linestyle() != point.get_linestyle()
    [legend] = figure.legends
    assert [text.get_text() for text in legend.texts] == ["two", "one"]
    figure.draw_without_rendering()
    assert kl.get_position().y0 > below.get_position().y1, "two panels are stacked"
    assert "0.005" in [text.get_text() for text in kl.get_yticklabels(which="both")]
    odd.draw_without_rendering()
    half, _, wide = odd.axes
    assert wide.get_position().width > 1.5 * half.get_position().width, "no empty quarter"
    assert not half.get_yticklabels(minor=True), "they would overlap"


def test_the_table_and_the_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "150")
    last = {"step": 88, "reward": 0.6, "mismatch/ratio_max": 2.0, "mismatch/kl_k3": 4.5e-5}
    last |= {"step_time": 2.0, "time/generate_s": 3.0, "time/sync_s": 0.5}
    scores = {"eval_sums/actor_avg@1": 0.25, "eval_sums/actor_tokens": 9.0}
    rows = {"a": [{"step": 4, "reward": 0.1}, last], "b": [{"step": 4, "reward": 0.0, **scores}]}
    runs = [write_run(tmp_path / "some" / name / "run", rows[name]) for name in rows]
    picture = tmp_path / "new" / "report.png"
    assert main(["report", runs[0], f"{runs[1]}/run.jsonl", "-o", str(tmp_path / "new")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # Of the first run, only the last row is among the last 20 rollouts.
    # A step took 2 s, and a rollout has four.
    assert ["a/run", "0.6", "–", "4.5e-05", "2", "3", "0.5", "8"] in lines
    assert ["b/run/run", "0", "0.25", "–", "–", "–", "–", "–"] in lines
    assert "sums/actor" in sum(lines, []) and "tokens" not in sum(lines, [])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sizes_of_rounding_and_updates(tmp_path, drawn):
    first = {f"{ROUNDING}/q_proj": 4e-5, f"{ROUNDING}/up_proj": 2e-5}
    later = {**first, f"{UPDATE}/q_proj": 1e-6, f"{UPDATE}/up_proj": 3e-6}
    measured = [{"step": 4, **first}, {"step": 20, **later}, {"step": 40, **later}]
    int8 = write_run(tmp_path / "int8", measured)
    bf16 = write_run(tmp_path / "bf16", [{"step": 4, "reward": 0.5}])

    assert main(["report", bf16]) == main(["report", int8]) == main(["report", bf16, int8]) == 0
    without, alone, beside = (figure.axes for figure in drawn)
    assert len(without) == 3  # reward, KL, ratio
    panel = alone[3]
    assert panel.get_yscale() == "log"
    assert [text.get_text() for text in panel.get_legend().texts] == ["q_proj", "up_proj"]
    rounding, update, _, other_update = panel.lines
    assert rounding.get_ydata().tolist() == [4e-5, 4e-5, 4e-5]
    assert (update.get_xdata().tolist(), update.get_ydata().tolist()) == ([5, 10], [1e-6, 1e-6])
    assert rounding.get_color() == update.get_color() != other_update.get_color()
    assert (rounding.get_linestyle(), update.get_linestyle()) == ("-", "--")
    # Beside another, a run has the mean of its kinds, in the color that it has in all panels.
    rounding, update = beside[3].lines
    assert rounding.get_ydata() == pytest.approx([3e-5] * 3)
    assert update.get_ydata() == pytest.approx([2e-6] * 2)
    assert rounding.get_color() == update.get_color() == COLORS[1]
    assert beside[3].get_legend() is None
    assert not beside[3].collections, "a band of a run's kinds would say nothing about seeds"


def test_bad_input_is_an_error(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", [{"step": 4, "reward": 0.5}])
    empty = write_run(tmp_path / "empty", [])
    for arguments, named in {
        (str(tmp_path / "absent"),): "absent does not exist",
        (run, run): "run is there twice",
        (run, empty): "empty/run.jsonl has no rows",
        (run, "-o", f"{run}/run.jsonl"): "jsonl",
        (run, "-o", f"{run}/run.jsonl/runs.png"): "run.jsonl",
    }.items():
        assert main(["report", *arguments]) == 2
        assert named in capsys.readouterr().err
    monkeypatch.setattr("trl_qurl.lab.packages.find_spec", lambda name: name != "rich" or None)
    assert main(["report", run]) == 2
    assert "pip install 'trl-qurl[report]'" in capsys.readouterr().err


def test_a_report_does_not_import_torch(tmp_path):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "alone", [{"step": 4, "reward": 0.5}])
    code = "import sys; from trl_qurl.cli import main\n"
    code += f"assert main(['report', {run!r}, '-o', {str(tmp_path / 'runs.svg')!r}]) == 0\n"
    code += "assert not {'torch', 'transformers', 'trl', 'vllm'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "\n alone " in done.stdout
    assert (tmp_path / "runs.svg").stat().st_size
