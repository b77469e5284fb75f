"""Simulate formats on GPUs: a line for each, a count of the results, and with `--write` the tables in
docs/choosing.md.
"""

import argparse
from itertools import chain

from simulated_gpu import table
from simulated_gpu.cases import MATRIX, MIXED
from simulated_gpu.forking import simulate_all

parser = argparse.ArgumentParser(prog="python -m simulated_gpu", description=__doc__)
parser.add_argument("--write", action="store_true", help="write the table of evidence")
args = parser.parse_args()
reports = {}
for case, report in simulate_all([*MATRIX, *chain(*MIXED.values())]):
    reports[case] = report
    kernels = dict.fromkeys(report.kernels.values())
    print(f"{case}: {', '.join(kernels)} {report.faults or 'as fresh'}", flush=True)
print(f"\n{table.summary(reports)}")
if args.write:
    table.write(reports)
