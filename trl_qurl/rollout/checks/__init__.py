"""Checks of a machine, a policy and a sync: nobody has to open this room."""
