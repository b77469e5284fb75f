"""The critic of PPO: what a critic does (`critic.py`), two implementations, and how they start (`start.py`)."""
