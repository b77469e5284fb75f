"""The lab: evaluation, benchmarks, reports, recipes and the demo. The core never imports it."""
