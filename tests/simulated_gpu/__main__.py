"""Simulate formats on GPUs: prints a line for each, and writes the tables in docs/choosing.md."""

from simulated_gpu import table
from simulated_gpu.cases import ON_THE_PAGE
from simulated_gpu.forking import simulate_all

reports = {}
for case, report in simulate_all(ON_THE_PAGE):
    reports[case] = report
    print(f"{case}: {report.kernels} {report.faults or 'as fresh'}", flush=True)
table.write(reports)
