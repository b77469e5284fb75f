"""Checks that a sync took effect: digests of tensors, as they are sent and received."""
