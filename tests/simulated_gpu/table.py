"""The tables in docs/choosing.md: formats by GPU, each with its kind of evidence, and two formats
in one engine.
"""

from documents import ROOT

from simulated_gpu.cases import MIXED
from simulated_gpu.engine import Case
from trl_qurl.quantization.formats import FORMATS

PAGE = ROOT / "docs" / "choosing.md"
BEGIN = "<!-- begin: python -m simulated_gpu -->\n"
END = "<!-- end -->\n"

ROWS = {
    "Turing (T4, RTX 20)": ["T4"],
    "Ampere (A100, A6000, RTX 30)": ["A100"],
    "Ada (L4, L40S, RTX 40)": ["RTX 40"],
    "Hopper (H100, H200)": ["H100"],
    "Blackwell (B200, RTX 50)": ["B200", "RTX 50"],
}
"""The GPUs that stand for each generation."""

CPU = ("int8", "fp8", "w4a16")
"""Formats with figures in benchmarks/."""

RAN = {"Hopper (H100, H200)": {"int8", "fp8", "w4a16"}}
"""Formats that a real GPU ran: started, reloaded and trained."""


def evidence(row, name, reports):
    """The word for what was found on all GPUs of a generation."""
    faults = [reports[Case(gpu, name)].faults for gpu in ROWS[row]]
    if any("refused" in found for found in faults):
        return "refused"
    if any(faults):
        return "fails"
    return "ran" if name in RAN.get(row, ()) else "simulated"


def rows(reports):
    names = [scheme.name for scheme in FORMATS]
    lines = [["your engine runs on", *(f"`{name}`" for name in names)]]
    for row in ROWS:
        lines.append([row, *(evidence(row, name, reports) for name in names)])
    lines.append(["CPU", *("measured" if name in CPU else "not tried" for name in names)])
    return table(*lines) + "\n" + table(*mixed_rows(reports))


def mixed_rows(reports):
    """The GPUs on which an engine with two formats reloads as it starts."""
    others = list(dict.fromkeys(other for _, other in MIXED))
    heading = ["in one engine"]
    for other in others:
        heading.append("with 16 bits" if other == "none" else f"with `{other}`")
    lines = [heading]
    for name in dict.fromkeys(scheme for scheme, _ in MIXED):
        line = [f"`{name}`"]
        for other in others:
            gpus = [case.gpu for case in MIXED[name, other] if not reports[case].faults]
            line.append(", ".join(gpus))
        lines.append(line)
    return lines


def table(heading, *rows):
    lines = [f"| {' | '.join(row)} |\n" for row in (heading, *rows)]
    lines.insert(1, f"|{'---|' * len(heading)}\n")
    return "".join(lines)


def read():
    """The tables as they are."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def write(reports):
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + rows(reports) + END + rest.partition(END)[2])
