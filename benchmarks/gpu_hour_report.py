"""Results of `gpu_hour.py`: read what its parts wrote, and turn it into tables and pictures.

    python benchmarks/gpu_hour_report.py gpu-hour    # for maintainers

stores the results of that directory in `results/`, and writes the tables of all stored ones into
`docs/performance.md` and `docs/choosing.md`.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from provenance import ROOT, result_path, write_record
from trainers import TRL
from training_step import PARTS

from trl_qurl.lab.comparison import label
from trl_qurl.lab.curves import COLORS
from trl_qurl.lab.processes import last_lines
from trl_qurl.lab.runs import read_run
from trl_qurl.trainers.run_log import RUN_LOG

PICTURES = {
    "steps.png": "Training steps",
    "demo/demo.png": "The training run",
}
LEARNED = ("expected_accuracy", "reward")
"""Metrics of the training run."""

BEGIN = "<!-- begin: python benchmarks/gpu_hour_report.py DIRECTORY -->\n"
END = "<!-- end: gpu_hour -->"
NOTHING = (
    "No results of `gpu_hour.py` are stored yet; an H200 was measured "
    "[by hand](../benchmarks/speed.md#on-a-gpu)."
)

Cell = dict[str, Any]


def read_figures(kind: str, folder: Path) -> dict[str, Any]:
    """Return the results that a part wrote into its directory, and a summary of them."""
    if kind == "demo":
        run = read_run(folder / RUN_LOG)
        series = {name: [value for _, value in run.series(name)] for name in LEARNED}
        ends = {
            name: {"first": values[0], "last": values[-1]}
            for name, values in series.items()
            if values
        }
        summary = ", ".join(
            f"{name} {end['first']:.2f} to {end['last']:.2f}" for name, end in ends.items()
        )
        return {"summary": summary, "metrics": ends}
    if kind == "bench":
        return read_bench(json.loads((folder / "bench.json").read_text()))
    if kind == "reload":
        record = json.loads((folder / "record.json").read_text())
        trials = [trial for trial in record["trials"] if trial["status"] != "skipped"]
        passed = sum(trial["status"] != "FAILED" for trial in trials)
        names = ("kernels", "kernel_failure")
        figures = {name: record[name] for name in names if name in record}
        summary = f"{passed} of {len(trials)} trials passed"
        return {"summary": summary, "trials": trials, **figures}
    if kind not in ("pack", "host", "sync", "steps"):
        return {"summary": last_lines(folder / "log.txt", 1)}
    record = json.loads((folder / "record.json").read_text())
    load = record.get("load") or record.get("protocol") or {}
    cells = []
    for cell in record["cells"]:
        # of weight_sync.py
        cell.setdefault("way", f"{cell.get('scheme') or 'bf16'}, {cell.get('transport')}")
        if "tokens" in load:
            cell["tokens"] = load["tokens"]
        # the medians
        cells.append({name: value for name, value in cell.items() if not isinstance(value, list)})
    return {
        "summary": f"{sum('failure' not in cell for cell in cells)} of {len(cells)} measured",
        "cells": cells,
    }


def read_bench(result: dict[str, Any]) -> dict[str, Any]:
    """Return a cell per format with the medians of `trl-qurl bench`."""
    load = result["load"]
    cells = []
    for form, taken in result["steps"].items():
        cell = {"way": form, "batch": load["batch"], "tokens": load["completion_len"]}
        for part in taken[0]:
            cell[f"{part}_s"] = statistics.median(step[part] for step in taken)
        cells.append(cell)
    for form, failure in result["failures"].items():
        cells.append({"way": form, "failure": failure})
    return {"summary": result["way"], "cells": cells}


def cells_of(record: dict[str, Any], kind: str) -> Iterator[tuple[str, Cell]]:
    """Yield `(size of the model, cell)` for what the parts of a kind measured."""
    for name, part in record["parts"].items():
        if name.startswith(f"{kind}-"):
            for cell in part["figures"].get("cells", ()):
                yield name.split("-")[1], cell


def publish(record: dict[str, Any], directory: Path) -> None:
    """Write `results.json`, the pictures, and `results.md`, which shows them."""
    write_atomically(directory / "results.json", json.dumps(record, indent=2) + "\n")
    draw_steps(record, directory / "steps.png")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    sections = [
        f"# {record['hardware']}",
        f"{record['date']}, commit {record['commit']}. {versions}.",
        "**A rehearsal with tiny models in float32: the figures mean nothing.**"
        if record["rehearsal"]
        else "",
        *(tabulate(record) for tabulate in TABLES),
        *(
            f"![{caption}]({name})"
            for name, caption in PICTURES.items()
            if (directory / name).exists()
        ),
    ]
    write_atomically(directory / "results.md", "\n\n".join(filter(None, sections)) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(text, encoding="utf-8")
    os.replace(tmp, path)


# Tables
# --------------------------------------------------------------------------------------------------


def markdown_table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    """Format a table; an empty string if it has no rows."""
    lines = [
        columns,
        ["---"] * len(columns),
        *([text.replace("|", "\\|") for text in row] for row in rows),
    ]
    return (
        f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""
    )


def number(value: float | None, digits: int = 2, base: float | None = 1.0) -> str:
    """Format a quotient, or a dash if one of its terms is missing."""
    return f"{value / base:,.{digits}f}" if value is not None and base else "–"


def part_table(record: dict[str, Any]) -> str:
    """List the parts."""
    rows = []
    for name, part in record["parts"].items():
        log = f"[{part['seconds']:.0f} s]({part['log']})" if "log" in part else ""
        text = " ".join((part["reason"] or part["figures"]["summary"]).split())
        rows.append([name, part["status"], log, part.get("commit") or "", text[:200]])
    return markdown_table("Parts", ["part", "status", "time, log", "commit", "result"], rows)


def reload_table(record: dict[str, Any]) -> str:
    """Show how far engines that reloaded weights are from new ones."""
    figures = record["parts"].get("reload", {}).get("figures", {})
    rows = []
    for trial in figures.get("trials", ()):
        data = trial["data"]
        distance = f"{data['distance']:.1e}" if "distance" in data else trial["text"]
        kernels = ", ".join(data.get("kernels", ()))
        row = [trial["format"], trial["name"], kernels, data.get("runner", ""), distance]
        rows.append([*row, trial["advice"]])
    columns = ["format", "trial", "kernels", "runner", "off a new engine, nats", "advice"]
    return markdown_table("Reloads", columns, rows)


def pack_table(record: dict[str, Any]) -> str:
    """Say whether weights are rounded to the same bits as on a CPU."""
    rows = []
    for cell in record["parts"].get("pack", {}).get("figures", {}).get("cells", ()):
        answer = cell.get("failure", "the same")[:300]
        rows.append([cell["way"], answer, number(cell.get("pack_s"), 3, 1e-3)])
    columns = ["format", "bits, compared with a CPU", "ms for 68 million weights"]
    return markdown_table("Rounding", columns, rows)


def rollout_table(record: dict[str, Any]) -> str:
    """Compare rollouts of an engine alone with those in 16 bits, and show the host's share."""
    cells = [(size, cell) for size, cell in cells_of(record, "host") if "rollout_s" in cell]

    def key(size: str, cell: Cell) -> tuple[Any, ...]:
        return size, cell["answers"], cell["text"]

    base = {key(size, cell): cell["rollout_s"] for size, cell in cells if cell["way"] == "bf16"}
    rows = []
    for size, cell in sorted(cells, key=lambda row: key(*row)):  # stable: formats stay in order
        tokens = cell["answers"] * cell["tokens"]
        speed = number(tokens, 0, cell["rollout_s"])
        slowest = number(tokens, 0, cell["slowest_s"])
        fastest = number(tokens, 0, cell["fastest_s"])
        host = number(1e6 * cell["host_s"], 1, tokens)
        row = [size, str(cell["answers"]), "yes" if cell["text"] else "no", cell["way"]]
        gain = number(base.get(key(size, cell)), 2, cell["rollout_s"])
        rows.append([*row, speed, f"{slowest}-{fastest}", gain, host])
    columns = ["model", "answers", "text", "rollouts", "tokens per second", "min-max"]
    columns += ["times as fast", "host, us a token"]
    return markdown_table("Rollouts of an engine alone, in turns", columns, rows)


def kernel_table(record: dict[str, Any]) -> str:
    """Compare a decoding step with the time of its kernels."""
    rows = []
    for size, cell in cells_of(record, "host"):
        if "wall_ms" not in cell:
            continue
        times = [number(cell[name], 2) for name in ("wall_ms", "kernel_ms")]
        share = f"{cell['kernel_ms'] / cell['wall_ms']:.0%}"
        rows.append([size, str(cell["answers"]), cell["way"], *times, share])
    columns = ["model", "answers", "rollouts", "decoding step, ms", "its kernels, ms", "share"]
    return markdown_table("Host against kernels (without text)", columns, rows)


def bench_table(record: dict[str, Any]) -> str:
    """Show the steps of `trl-qurl bench`."""
    cells = [(size, cell) for size, cell in cells_of(record, "bench") if "rollout_s" in cell]
    rows = []
    for size, cell in cells:
        tokens = cell["batch"] * cell["tokens"]
        host = number(1e6 * cell["host_s"], 1, tokens) if "host_s" in cell else "–"
        seconds = [number(cell.get(f"{part}_s")) for part in ("step", "sync", "rollout", "update")]
        rows.append([size, label(cell["way"]), *seconds, host])
    columns = ["model", "rollouts", "step, s", "sync", "rollout", "update", "host, us a token"]
    return markdown_table("Steps in turns (trl-qurl bench)", columns, rows)


def sync_table(record: dict[str, Any]) -> str:
    """Compare the seconds and bytes of syncs."""
    rows = []
    for size, cell in cells_of(record, "sync"):
        seconds = [number(cell.get(name), 3) for name in ("sync_s", "quantize_s", "check_s")]
        rows.append([size, cell["way"], number(cell.get("bytes"), 0, 1e6), *seconds])
    return markdown_table(
        "Sync", ["model", "way", "MB", "sync, s", "of it quantization", "check, s"], rows
    )


def step_table(record: dict[str, Any]) -> str:
    """Compare steps and their parts with BF16 rollouts and with plain TRL."""
    cells = sorted(cells_of(record, "steps"), key=lambda row: (row[0], row[1].get("tokens", 0)))
    seconds = {(size, cell.get("tokens"), cell["way"]): cell.get("step_s") for size, cell in cells}
    rows = []
    for size, cell in cells:
        tokens = cell.get("tokens")
        parts = [number(cell.get(f"{part}_s")) for part in ("step", *PARTS)]
        bases = [seconds.get((size, tokens, base)) for base in ("bf16", TRL)]
        gains = [number(base, 2, cell.get("step_s")) for base in bases]
        rows.append([size, str(tokens), cell["way"], *parts, *gains])
    columns = ["model", "tokens", "rollouts", "step, s", *PARTS]
    columns += ["speed-up over bf16", "over plain TRL"]
    return markdown_table("Training steps (7B: of an adapter)", columns, rows)


TABLES = (
    part_table,
    pack_table,
    reload_table,
    rollout_table,
    kernel_table,
    step_table,
    bench_table,
    sync_table,
)
"""The tables of `results.md`."""


# Pictures
# --------------------------------------------------------------------------------------------------


def draw_steps(record: dict[str, Any], path: Path) -> None:
    """Draw a bar per model and format: the seconds of a step's parts."""
    measured = [(size, cell) for size, cell in cells_of(record, "steps") if "step_s" in cell]
    cells = [(f"{size}, {cell['tokens']} tokens", cell) for size, cell in measured]
    if not cells:
        return
    counts = {size: sum(size == other for other, _ in cells) for size, _ in cells}
    figure = Figure(figsize=(7.5, 1.5 + 0.45 * len(cells)), layout="constrained")
    # An axis per model, because their steps differ by an order of magnitude.
    rows = figure.subplots(len(counts), squeeze=False, height_ratios=list(counts.values()))[:, 0]
    for axes, size in zip(rows, counts, strict=True):
        shown = [cell for other, cell in cells if other == size]
        ways, start = [cell["way"] for cell in shown], [0.0] * len(shown)
        for part, color in zip((*PARTS, "not logged"), (*COLORS[1:5], "#BBBBBB"), strict=True):
            rest = [cell["step_s"] - so_far for cell, so_far in zip(shown, start, strict=True)]
            lengths = (
                rest if part == "not logged" else [cell.get(f"{part}_s", 0.0) for cell in shown]
            )
            axes.barh(ways, lengths, left=start, color=color, label=part)
            start = [left + length for left, length in zip(start, lengths, strict=True)]
        axes.bar_label(
            axes.containers[-1], [f"{total:.2f}" for total in start], padding=3, fontsize=8
        )
        axes.invert_yaxis()
        axes.margins(x=0.08)
        axes.set_title(size, loc="left", fontsize=8)
    rows[-1].set_xlabel("seconds")
    save(figure, "A training step", record, path)


def save(figure: Figure, title: str, record: dict[str, Any], path: Path) -> None:
    """Add a title and a legend, and write the file."""
    figure.suptitle(
        f"{title}, {record['hardware']}{', rehearsal' if record['rehearsal'] else ''}", fontsize=10
    )
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8
    )
    figure.savefig(path, dpi=130)


# Pages of the documentation
# --------------------------------------------------------------------------------------------------


def headed(record: dict[str, Any], text: str) -> str:
    """Put a line about the machine above a record's tables; an empty string above none."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    about = f"**{record['hardware']}**, {record['date']}, commit {record['commit']}, {versions}:"
    return f"{about}\n\n{text}" if text else ""


PAGES = {
    ROOT / "docs" / "performance.md": (rollout_table, kernel_table, step_table),
    ROOT / "docs" / "choosing.md": (reload_table,),
}
"""The tables of each page."""

RESULTS = ROOT / "benchmarks" / "results"


def page_texts(records: Sequence[dict[str, Any]]) -> dict[Path, str]:
    """Return what belongs into each page."""
    texts = {}
    for page, tables in PAGES.items():
        sections = []
        for record in records:
            filled = [table(record).partition("\n\n")[2] for table in tables]  # without its title
            sections.append(headed(record, "\n\n".join(filter(None, filled))))
        texts[page] = "\n\n".join(filter(None, sections)) or NOTHING
    return texts


def with_block(page: str, text: str) -> str:
    """Return a page with this text between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{text}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Store the results of a run, and write the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="of gpu_hour.py")
    results = parser.parse_args(argv).directory / "results.json"
    if not results.is_file():
        parser.error(
            f"{results} does not exist: give the directory that gpu_hour.py wrote to (-o)."
        )
    record = json.loads(results.read_text())
    if record["rehearsal"]:
        parser.error("These are the results of a rehearsal: their figures mean nothing.")
    write_record(record, RESULTS / result_path("gpu_hour", record).name)
    for page, text in page_texts(stored_records()).items():
        write_atomically(page, with_block(page.read_text(), text))
        print(f"Written to {page}")
    return 0


def stored_records() -> list[dict[str, Any]]:
    """Return the stored results, the oldest first."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("gpu_hour-*.json"))]


if __name__ == "__main__":
    sys.exit(main())
