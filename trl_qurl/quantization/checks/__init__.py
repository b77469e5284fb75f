"""Refusals before slow work: each function raises, or tells why it would."""
