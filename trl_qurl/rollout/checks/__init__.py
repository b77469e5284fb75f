"""Checks of a policy before it is sent, and of what arrived: nobody has to open this room."""
