"""The version, in the one place that `setup.cfg` and `trl_qurl.__version__` both read."""

__version__ = "0.1.0"
"""The version of the package."""
