"""What works around a fault of vLLM or TRL: a file for each report in docs/upstream.md.

The method can be read without these files. Each one names its `REPORTS`, the newest release with
the fault (`SEEN_IN`), and the one from which the file is unnecessary, once there is such a release
(`UNNECESSARY_FROM`). tests/test_repairs.py fails when setup.cfg allows a release that was not
looked at, or none that has the fault: then the file and its report can go.
"""
