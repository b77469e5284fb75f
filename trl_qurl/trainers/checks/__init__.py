"""Checks: nobody has to open this room to understand training."""
