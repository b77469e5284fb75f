"""The table and the picture of `trl-qurl report`, against numbers worked out by hand."""

import json
import subprocess
import sys

import numpy as np
import pytest

from trl_qurl.cli import main
from trl_qurl.lab.curves import Panel, Points, draw
from trl_qurl.lab.update_size import ROUNDING, UPDATE

pytest.importorskip("rich")
pytest.importorskip("matplotlib")


def write_run(directory, *rows, **settings):
    directory.mkdir(parents=True)
    lines = [{"settings": settings}, *rows]
    (directory / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(directory)


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn."""
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure)
    )
    return drawn


def points(*values):
    """Of the rollouts 1 and 9."""
    return Points(np.array([1.0, 9.0]), np.array(values))


def described(figure):
    """Titles and scales of a figure's panels, style and points of their lines, and legends."""
    lines = []
    legends = [*figure.legends]
    for axes in figure.axes:
        title = f"{axes.get_title('left')}, {axes.get_ylabel()}"
        lines.append(f"{title}, {axes.get_xlabel()}, {axes.get_yscale()}")
        for line in axes.lines:
            style = f"{line.get_color()} {line.get_linestyle()}{line.get_marker()}"
            points = [f"{x:g}:{y:g}" for x, y in line.get_xydata()]
            lines.append(" ".join([style, *points]))
        if axes.get_legend():
            legends.append(axes.get_legend())
    for legend in legends:
        lines.append(" ".join(["legend:", *(text.get_text() for text in legend.texts)]))
    return "\n".join(lines)


TABLE = """
                        eval
                  sums/actor      kl ratio generate sync whole
 run       reward      avg@1      k3   max        s    s     s
 ─────────────────────────────────────────────────────────────
 a/run        0.6          – 4.5e-05     2        3  0.5     8
 b/run/run    0.7       0.25       –     –        –    –     –

Means of the last 20 rollouts, in short runs of the last half.
Seconds of a rollout: to generate, to sync, and with all of its
updates.
Picture: new/report.png"""

PICTURE = """\
Reward, mean over answers, rollout, linear
#7d7d7d - 2:0.1 22:0.6
#D55E00 -- 1:0.2 2:0.4 4:0.6 6:0.7
Held out: sums/actor, mean over answers, rollout, linear
#D55E00 --o 6:0.25
KL(actor ‖ policy), nats per token, rollout, log
#7d7d7d -o 22:4.5e-05
#7d7d7d --None 0:0.005 1:0.005
Largest ratio ρ of a token, policy / actor, rollout, log
#7d7d7d -o 22:2
#7d7d7d --None 0:2 1:2
legend: a/run b/run/run"""


def test_two_runs_side_by_side(tmp_path, figures, capsys, monkeypatch):
    """Of the first run, only the last row is among the last 20 rollouts, and a step took 2 s, of
    which a rollout has four; a row from within the second rollout counts for it. The other has no
    rollouts, only steps: 0, 0.4, 0.8 and 0.6 at 1, 2, 4 and 6, each drawn as the mean of those up
    to two on either side.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    first = {"step": 5, "reward": 0.1}
    last = {
        "step": 88,
        "reward": 0.6,
        "mismatch/ratio_max": 2.0,
        "mismatch/kl_k3": 4.5e-5,
        "step_time": 2.0,
        "time/generate_s": 3.0,
        "time/sync_s": 0.5,
    }
    one = write_run(tmp_path / "some/a/run", first, last, updates_per_rollout=4)
    rewards = [0, 0.4, None, 0.8, "text", 0.6]
    rows = [{"step": step, "reward": reward} for step, reward in enumerate(rewards, 1)]
    rows[-1] |= {"eval_sums/actor_avg@1": 0.25, "eval_sums/actor_tokens": 9.0}
    two = write_run(tmp_path / "some/b/run", *rows)
    assert main(["report", one, f"{two}/run.jsonl", "-o", "new"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(printed) == TABLE
    assert described(*figures) == PICTURE


WITHOUT = """\
Reward, mean over answers, rollout, linear
#7d7d7d -o 4:0.5
KL(actor ‖ policy), nats per token, rollout, log
#7d7d7d --None 0:0.005 1:0.005
Largest ratio ρ of a token, policy / actor, rollout, log
#7d7d7d --None 0:2 1:2
"""
WEIGHTS = """\
Change of the weights: by rounding (solid), by updates (dashed), ‖change‖² / ‖weights‖², rollout, log
"""
ALONE = """\
#7d7d7d - 1:4e-05 5:4e-05 10:4e-05
#7d7d7d -- 5:1e-06 10:1e-06
#D55E00 - 1:2e-05 5:2e-05 10:2e-05
#D55E00 -- 5:3e-06 10:3e-06
legend:
legend: q_proj up_proj"""
BESIDE = """\
#D55E00 - 1:3e-05 5:3e-05 10:3e-05
#D55E00 -- 5:2e-06 10:2e-06
legend: bf16"""


def test_sizes_of_rounding_and_updates(tmp_path, figures):
    """Beside another, a run has the mean of its kinds of layers, in its color."""
    first = {f"{ROUNDING}/q_proj": 4e-5, f"{ROUNDING}/up_proj": 2e-5}
    later = {**first, f"{UPDATE}/q_proj": 1e-6, f"{UPDATE}/up_proj": 3e-6}
    measured = [{"step": 4, **first}, {"step": 20, **later}, {"step": 40, **later}]
    int8 = write_run(tmp_path / "int8", *measured, updates_per_rollout=4)
    bf16 = write_run(tmp_path / "bf16", {"step": 4, "reward": 0.5})
    for runs in ((bf16,), (int8,), (bf16, int8)):
        assert main(["report", *runs]) == 0
    without, alone, beside = map(described, figures)
    assert without == f"{WITHOUT}legend: bf16"
    assert alone.endswith(WEIGHTS + ALONE)
    assert beside == WITHOUT + WEIGHTS + BESIDE
    *_, weights = figures[-1].axes
    assert not weights.collections, "a band of a run's kinds would say nothing about seeds"


def test_panels_of_a_study(tmp_path, figures):
    """Runs that differ in their seeds; labels on logarithmic axes; an odd panel is wide."""
    seeds = [points(0.001, 1.0), points(0.003, 3.0)]
    decades = {"": [points(5e-6, 1.0)]}
    other = Panel("", "", {})
    draw([Panel("", "", {"two": seeds}, logarithmic=True), other], tmp_path)
    draw([Panel("", "", decades, logarithmic=True), other, other], tmp_path)
    stacked, odd = figures
    assert "#7d7d7d - 1:0.002 9:2" in described(stacked)
    for figure in figures:
        figure.draw_without_rendering()
    above, below = stacked.axes
    [band] = above.collections
    assert band.get_datalim(above.transData).intervaly.tolist() == [0.001, 3]
    assert "0.005" in [text.get_text() for text in above.get_yticklabels(which="both")]
    assert above.get_position().y0 > below.get_position().y1
    half, _, wide = odd.axes
    assert wide.get_position().width > 1.5 * half.get_position().width, "no empty quarter"
    assert not half.get_yticklabels(minor=True), "they would overlap"


def test_bad_input_is_an_error(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "run", {"step": 4, "reward": 0.5})
    empty = write_run(tmp_path / "empty")
    mistakes = {
        f"{tmp_path}/absent": "absent does not exist",
        run: "run is there twice",
        empty: "empty/run.jsonl has no rows",
        f"-o {run}/run.jsonl": "jsonl",
        f"-o {run}/run.jsonl/runs.png": "run.jsonl",
    }
    for arguments, named in mistakes.items():
        assert main(["report", run, *arguments.split()]) == 2
        assert named in capsys.readouterr().err
    monkeypatch.setattr("trl_qurl.lab.packages.find_spec", lambda name: name != "rich" or None)
    assert main(["report", run]) == 2
    assert "pip install 'trl-qurl[report]'" in capsys.readouterr().err


def test_a_report_does_not_import_torch(tmp_path):
    run = write_run(tmp_path / "alone", {"step": 4, "reward": 0.5})
    code = "import sys; from trl_qurl.cli import main\n"
    code += f"assert main('report {run} -o {tmp_path}/runs.svg'.split()) == 0\n"
    code += "assert not {'torch', 'transformers', 'trl', 'vllm'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "\n alone " in done.stdout
    assert (tmp_path / "runs.svg").stat().st_size
