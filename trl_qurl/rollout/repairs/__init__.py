"""What works around a fault of vLLM or TRL: a file for each report in docs/upstream.md.

The method can be read without these files. Each one names its `REPORTS`, the newest release in
which the fault was seen, and the release from which the file is unnecessary, once there is one.
tests/test_repairs.py fails when setup.cfg no longer allows a release with the fault. Then remove
the file and its report.
"""
