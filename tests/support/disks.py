"""Small file systems."""

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(directory, options):
    """Make a directory and mount a tmpfs there, with options such as `size=64k` or `ro`."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        yield directory
    finally:
        # a trainer may still hold its lock there
        subprocess.run(["umount", "--lazy", directory], check=True)
