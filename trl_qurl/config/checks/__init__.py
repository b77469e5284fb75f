"""Refusals of configurations: nobody has to open this room to know the settings.

A refusal names the values, says why they cannot work, and shows the way out.
"""
