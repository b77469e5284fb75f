"""TRL's trainers with quantized rollouts, and their callbacks."""
