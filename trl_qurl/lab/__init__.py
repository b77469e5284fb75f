"""Evaluation, benchmarks, reports, recipes and the demo. The core never imports this package."""
