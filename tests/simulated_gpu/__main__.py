"""Simulate formats on GPUs: a line for each, and with `--write` the tables in docs/choosing.md."""

import argparse
from dataclasses import replace
from itertools import chain

from simulated_gpu import table
from simulated_gpu.cases import CORNERS, MATRIX, MIXED
from simulated_gpu.forking import simulate_all

parser = argparse.ArgumentParser(prog="python -m simulated_gpu", description=__doc__)
parser.add_argument(
    "--all", action="store_true", help="also corners: experts, sleep mode, tensor parallelism, ..."
)
parser.add_argument("--unrepaired", action="store_true", help="vLLM's own reload, in all formats")
parser.add_argument("--write", action="store_true", help="write the table of evidence")
args = parser.parse_args()
cases = [*MATRIX, *chain(*MIXED.values()), *(CORNERS if args.all else ())]
if args.unrepaired:
    cases = [replace(case, is_repaired=False, is_refused=False) for case in cases]
reports = {}
for case, report in simulate_all(cases):
    reports[case] = report
    print(
        f"{case}: {', '.join(dict.fromkeys(report.kernels.values()))} "
        f"{report.faults or 'as fresh'}",
        flush=True,
    )
print(f"\n{sum(not report.faults for report in reports.values())} of {len(reports)} as fresh")
if args.write:
    table.write(reports)
