"""Checks that a sync took effect: for files and servers, digests of tensors, sent and received."""
