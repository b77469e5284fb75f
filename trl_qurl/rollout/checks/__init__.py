"""Checks that a sync took effect: digests, the tensors that layers hold, and a probe."""
