"""Do quantized rollouts pay off? Takes steps of the real trainer in each format, and compares."""
