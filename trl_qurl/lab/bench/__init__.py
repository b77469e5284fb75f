"""Will quantized rollouts pay? Costs measured on this machine, and what they make of a training step."""
