"""The critic of PPO, and the model that it starts from."""
