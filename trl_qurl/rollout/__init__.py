"""Rollouts: TRL's backend on quantized weights (`backend`), the `engine`, the `checks` of a sync,
and metrics.
"""
