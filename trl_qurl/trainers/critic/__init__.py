"""The critic of PPO: what a critic does (`critic.py`), two implementations, and what a critic starts from."""
