"""The table and the picture of `trl-qurl report`, against numbers worked out by hand."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trl_qurl.cli import main
from trl_qurl.lab.curves import Points, final_value, interval, points_of, smooth
from trl_qurl.lab.report import draw_report, label_runs, seconds_per_rollout
from trl_qurl.lab.runs import Run

SETTINGS = {"rollout_quantization": "int8", "objective": "acr", "seed": 0, "updates_per_rollout": 4}


def run_of(rows=(), **changed):
    return Run(Path("runs/run.jsonl"), {**SETTINGS, **changed}, [dict(row) for row in rows])


def write_run(directory, rows, **changed):
    directory.mkdir(parents=True)
    lines = [{"settings": SETTINGS | changed}, *rows]
    (directory / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(directory)


def test_metrics_over_rollouts():
    rows = [{"step": 1, "reward": 1}, {"step": 8, "reward": None}, {"step": 10, "reward": math.nan}]
    rows += [
        {"step": 12, "other": 3.0},
        {"step": 16, "reward": 0.25},
        {"step": 18, "reward": "text"},
    ]
    rollouts, values = points_of(run_of(rows), "reward")
    assert rollouts.tolist() == [1, 4]  # 1 / 4, rounded up, and 16 / 4
    assert values.tolist() == [1, 0.25]
    # steps
    assert points_of(run_of(rows, updates_per_rollout=None), "reward").rollouts.tolist() == [1, 16]
    points = Points(np.arange(1.0, 6), np.array([1.0, 5, 3, 4, 2]))
    # Window 3: the neighbors on either side, and at the ends only one: (1+5)/2, (1+5+3)/3,
    # (5+3+4)/3, (3+4+2)/3, 3.
    assert smooth(points, 3).values.tolist() == [3, 3, 4, 3, 3]
    assert smooth(points, 1).values.tolist() == points.values.tolist()
    # the mean of 11 to 30
    assert final_value(Points(np.arange(1.0, 31), np.arange(1.0, 31))) == 20.5
    # logged every 50 rollouts
    assert final_value(Points(np.array([50.0, 100]), np.array([1.0, 3]))) == 3
    assert final_value(Points(np.empty(0), np.empty(0))) is None
    # Wilson's interval of 16 of 32: (16 + 1.92 ± 1.96 √(8 + .96)) / (32 + 3.84), and of 0 of 32:
    # 3.84 / 35.84.
    ends = interval(
        Points(np.array([0.0, 10]), np.array([0.5, 0])), Points(np.array([10.0]), np.array([32.0]))
    )
    np.testing.assert_allclose(ends, [[0.336, 0], [0.664, 0.107]], atol=1e-3)


def test_panels_of_the_picture(tmp_path, monkeypatch):
    figure, drawn = pytest.importorskip("matplotlib.figure").Figure, []
    monkeypatch.setattr(
        figure,
        "savefig",
        lambda self, *_, **kw: drawn.append(self) or self.draw_without_rendering(),
    )
    row = {"step": 4, "reward": 0.0, "mismatch/kl_k3": 0.001, "mismatch/ratio_max": 1.8}
    held_out = {"step": 8, "mismatch/kl_k3": 0.04, "held_out_accuracy": 0.5, "held_out_answers": 32}
    for rows in ([row], [row, row | held_out]):
        draw_report({"INT8": run_of(rows, model="my/model")}, tmp_path)
    (wide, narrow, _), (reward, accuracy, kl, ratio) = (figure.axes for figure in drawn)
    assert wide.get_position().width > 1.5 * narrow.get_position().width  # no empty quarter
    assert reward.get_ylim() == (-0.02, 1.02) and reward.get_figure().get_suptitle() == "model"
    assert (
        len(accuracy.collections) == 1
        and accuracy.get_title("left") == "Held out accuracy, 95 % intervals"
    )
    ticks = [
        [text.get_text() for text in axes.get_yticklabels(which="both")] for axes in (kl, ratio)
    ]
    assert {"0.001", "0.002", "0.005", "0.01"} <= {*ticks[0]} and not any(
        "10^" in tick for tick in sum(ticks, [])
    )


def test_seconds_per_rollout():
    seconds = {
        "time/generate_s": 10.0,
        "time/quantize_s": 1.0,
        "time/sync_s": 3.0,
        "time/logps_s": 1.5,
    }
    seconds |= {"time/update_s": 1.25, "step_time": 5.5}
    rows = [{"step": 4, **seconds, "time/generate_s": 100.0}, {"step": 8, **seconds}]
    # The first rollout is left out. The parts are 10 + 3 + 1.5 + 4 x 1.25 = 19.5; four steps of 5.5
    # are 22.
    assert seconds_per_rollout(run_of(rows)) == (22, 10, 3)
    assert seconds_per_rollout(run_of(rows[:1]))[1] == 100  # the only one
    # Slow optimizers: 10 + 3 + 1.5 + 4 x 5 = 34.5.
    assert seconds_per_rollout(run_of([{"step": 4, **seconds, "time/update_s": 5.0}]))[0] == 34.5


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ([{}], [": INT8, acr"]),
        ([{}, {}], [": INT8, acr", " #2: INT8, acr"]),
        ([{"objective": "tis"}, {"objective": "naive"}], [": tis", " #2: naive"]),
        ([{"seed": 0}, {"seed": 1}], [": seed 0", " #2: seed 1"]),
        ([{"beta": 0.1}, {"beta": 0.0, "rollout_quantization": None}], [": INT8, beta 0.1", " #2: 16 bits, beta 0.0"]),
        # a setting that only one run recorded
        ([{"new": 1}, {}], [": INT8, acr", " #2: INT8, acr"]),
        ([{"output_dir": "a", "seed": 1}, {"output_dir": "b", "seed": 2}], [": seed 1", " #2: seed 2"]),
        ([dict.fromkeys("abcde", n) for n in (1, 2)], [": a 1, b 1, c 1, d 1, ...", " #2: a 2, b 2, c 2, d 2, ..."]),
    ],
)  # fmt: skip
def test_labels_show_the_settings_in_which_runs_differ(changes, labels):
    assert list(label_runs([run_of(**changed) for changed in changes])) == [
        f"runs{label}" for label in labels
    ]


def test_the_table_and_the_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "150")
    first = {"step": 4, "reward": 0.1, "mismatch/ratio_max": 900.0}
    last = {"step": 88, "reward": 0.6, "mismatch/ratio_max": 2.0, "mismatch/kl_k3": 4.5e-5}
    last |= {"step_time": 2.0, "time/generate_s": 3.0, "time/sync_s": 0.5}
    scores = {"eval_sums/actor_avg@1": 0.25, "eval_sums/actor_tokens": 9.0}
    before = {"step": 0, "eval_sums/actor_avg@1": 0.75}
    rows = {"a": [first, last], "b": [before, {"step": 4, "reward": 0.0, **scores}], "c": []}
    runs = [
        write_run(tmp_path / name, rows[name], objective="tis" if name == "b" else "acr")
        for name in rows
    ][:2]
    picture = tmp_path / "runs.png"
    assert main(["report", *runs, "-o", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    acr, tis = (line.split()[1:] for line in lines if line.split()[:1] in (["a"], ["b"]))
    # Only the last row is among the last 20 rollouts. Four updates of 2 seconds.
    assert acr == ["–", "0.6", "4.5e-05", "900", "8", "3", "0.5"]
    assert tis == ["0.25", "0", "–", "–", "–", "–", "–"]
    assert any("eval sums/actor avg@1" in line for line in lines) and not any(
        "tokens" in line for line in lines
    )
    assert [line.strip() for line in lines[-3:-1]] == ["a: acr", "b: tis"]
    assert lines[-1] == f"Picture: {picture}" and picture.read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(tmp_path), "-o", str(picture)]) == 0, (
        "the runs below a directory that have rows"
    )
    assert capsys.readouterr().out.splitlines() == lines


def test_bad_input_is_an_error(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    run, empty = (
        write_run(tmp_path / "run", [{"step": 4, "reward": 0.5}]),
        write_run(tmp_path / "new" / "empty", []),
    )
    for arguments, message in {
        (str(tmp_path / "absent"),): "does not exist: pass the output_dir of a run",
        (run, str(Path(empty).parent)): "new/empty/run.jsonl has no rows yet: leave this run out",
        (run, "-o", f"{run}/run.jsonl"): "Format 'jsonl' is not supported (supported formats: ",
        (run, "-o", str(tmp_path / "absent" / "runs.png")): "No such file or directory",
    }.items():
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(
        "trl_qurl.lab.packages.find_spec", lambda name: None if name == "rich" else name
    )
    assert main(["report", run]) == 2
    assert "A report needs rich: run `pip install 'trl-qurl[report]'`." in capsys.readouterr().err


def test_a_report_does_not_import_torch(tmp_path):
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", [{"step": 4, "reward": 0.5}])
    code = "import sys; from trl_qurl.cli import main\n"
    code += f"assert main(['report', {run!r}, '-o', {str(tmp_path / 'runs.svg')!r}]) == 0\n"
    code += "assert not {'torch', 'transformers', 'trl', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "runs.svg").stat().st_size
