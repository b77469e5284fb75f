"""The page of a report as a browser would read it, its files, and what is said about runs that cannot be drawn."""

import base64
import gzip
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from trl_qurl.lab.report.groups import load_runs
from trl_qurl.lab.report.page import write_report

SETTINGS = {"rollout_quantization": "int8", "objective": "acr", "uaq_scale": 1.0, "seed": 0, "updates_per_rollout": 4}
ROWS = [{"step": 4 * n, "reward": 0.1 * n, "mismatch/kl_k3": 1e-4 * n, "time/generate_s": 10.0} for n in range(1, 4)]


def rewards(values):
    """One row per rollout, beginning with the first."""
    return [{"step": 4 * number, "reward": value} for number, value in enumerate(values, start=1)]


def write_run(directory, rows=({"step": 4, "reward": 0.5},), name="run.jsonl", **changed):
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(content) for content in ({"settings": {**SETTINGS, **changed}}, *rows)]
    place = directory / name
    content = ("\n".join(lines) + "\n").encode()
    place.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return place


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
    start = "data:image/png;base64,"
    assert len(sources) == 3 and all(source.startswith(start) for source in sources)  # reward, KL, seconds
    assert all(base64.b64decode(source.removeprefix(start)).startswith(b"\x89PNG") for source in sources)
    assert list(written.report.page.parent.iterdir()) == [written.report.page]
    assert not page.all("link") and not page.all("script") and not page.all("iframe")
    assert not [attributes for _, attributes in page.elements if "href" in attributes or "srcset" in attributes]
    assert "http" not in re.sub(r"base64,[\w+/=]+", "", written.text) and "url(" not in written.text


def test_the_report_of_one_run_has_its_name_model_settings_and_date(tmp_path):
    log = write_run(tmp_path / "first-try", ROWS, model="/models/Tiny-1B/", date="2026-11-21")
    copy = tmp_path / "int8_acr-seed0.jsonl.gz"
    copy.write_bytes(gzip.compress(log.read_bytes()))
    for given, name in ((log.parent, "first-try"), (copy, "int8_acr-seed0")):
        write_report([given], tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert f"<h1>{name}: Tiny-1B, INT8, acr, 2026-11-21</h1>" in text
        assert f"<title>{name}: Tiny-1B, INT8, acr, 2026-11-21 – trl-qurl report</title>" in text


def test_the_page_can_be_read_by_anyone(written):
    page = Page(written.text)
    assert page.all("html") == [{"lang": "en"}] and len(page.all("h1")) == 1
    assert written.text.startswith("<!DOCTYPE html>") and page.all("title") == [{}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    reward = page.all("img")[0]["alt"]
    # At rollout 3 both seeds of acr stand at 0.3; tis ended at rollout 2.
    assert reward.endswith("At the end: acr (2 seeds) 0.3; <i>tis</i> $x_{$ (1 seed) 0.2.")
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
    assert "2026-11-21" in text
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
    assert "lowest seed" not in text and "confidence interval" not in text and "Settings that differ" not in text
    assert "smoothed by itself over 9 rollouts" in text  # 160 steps that count as rollouts
    assert "A rollout is 1 optimizer update." in text


def test_zipped_logs_and_killed_runs(tmp_path):
    zipped = write_run(tmp_path / "zipped", rewards([0.1, 0.2]), name="any-name.jsonl.gz")
    killed = write_run(tmp_path / "killed", rewards([0.3, 0.4]), seed=1)
    with open(killed, "a") as file:
        file.write('{"step": 12, "rew')
    runs, notes = load_runs([zipped, killed, tmp_path / "killed"])
    assert [[row["reward"] for row in run.rows] for run in runs] == [[0.1, 0.2], [0.3, 0.4]]
    assert notes == [f"{tmp_path / 'killed'} was given more than once, but counts once."]
    again = write_run(tmp_path / "again", rewards([0.5]), seed=1)
    (note,) = write_report([zipped, killed, again], tmp_path / "page.html").notes
    assert "repetition 2" in note


def test_runs_without_rows_are_left_out_and_named(tmp_path):
    write_run(tmp_path / "good", rewards([0.5]))
    write_run(tmp_path / "new", [])
    report = write_report([tmp_path / "good", tmp_path / "new"], tmp_path / "page.html")
    assert report.notes == (f"{tmp_path / 'new'} is left out: it has not logged anything yet.",)
    assert report.notes[0] in Page(report.page.read_text()).visible
    with pytest.raises(ValueError, match=r"None of the runs .*new\) has logged anything yet.*The first row appears"):
        write_report([tmp_path / "new"], tmp_path / "page.html")


# What can go wrong ---------------------------------------------------------------------------------------------------


def test_errors_name_what_was_given_and_the_way_out(tmp_path):
    with pytest.raises(ValueError, match="No runs to read: give the output_dir"):
        write_report([], tmp_path / "page.html")
    with pytest.raises(FileNotFoundError, match="pass the output_dir of a run"):
        write_report([tmp_path / "absent"], tmp_path / "page.html")
    log = write_run(tmp_path / "run")
    with pytest.raises(OSError, match=r"\(Is a directory\): choose a writable file"):
        write_report([log], tmp_path)
    with pytest.raises(
        OSError, match=r"Cannot write the report to .*run\.jsonl/page\.html \(.+\): choose a writable file"
    ):
        write_report([log], log / "page.html")
    before = log.read_bytes()
    with pytest.raises(ValueError, match="would overwrite .*run.jsonl, the log of one of its runs"):
        write_report([tmp_path / "run"], log)
    assert log.read_bytes() == before


def test_a_missing_library_is_named_with_the_way_to_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs jinja2: .*pip install 'trl-qurl\[report\]'"):
        write_report([tmp_path], tmp_path / "page.html")


def test_a_report_needs_neither_torch_nor_a_display(tmp_path):
    write_run(tmp_path / "run")
    script = (
        "import sys; from pathlib import Path; from trl_qurl.lab.report.page import write_report\n"
        "heavy = {'torch', 'transformers', 'trl', 'vllm', 'matplotlib', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "write_report([Path(sys.argv[1])], Path(sys.argv[2]))\n"
        "heavy = {'torch', 'transformers', 'trl', 'vllm', 'matplotlib.pyplot'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, tmp_path / "run", tmp_path / "page.html"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
