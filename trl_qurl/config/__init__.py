"""Trainer configurations: TRL's, plus the settings of quantized rollouts and the critic.

Nothing is imported here, so that commands can check names before seconds of imports.
"""
