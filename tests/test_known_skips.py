"""CI fails where a test is skipped for a reason that nobody has listed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize(("reason", "status"), [("needs a CUDA device", 0), ("needs an oracle", 1)])
def test_only_known_reasons_are_accepted(tmp_path, reason, status):
    test = tmp_path / "test_skipped.py"
    test.write_text(f"import pytest\n\ndef test_it():\n    pytest.skip({reason!r})\n")
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", str(test)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "KNOWN_SKIPS_ONLY": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == status, run.stdout + run.stderr
    assert (f"does not list: {reason}" in run.stdout) == bool(status)
