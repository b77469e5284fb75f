"""Trainers and callbacks: TRL's, with quantized rollouts."""
