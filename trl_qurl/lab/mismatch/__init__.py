"""`trl-qurl mismatch`: how far quantized rollouts of a model are from its full-precision policy."""
