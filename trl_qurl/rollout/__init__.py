"""Rollouts: the engine (`generation`, `server`, `worker`) and its distance from the policy (`mismatch`, ...)."""
