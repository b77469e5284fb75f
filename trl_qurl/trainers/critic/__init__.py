"""PPO's critic and the loading of its model."""
