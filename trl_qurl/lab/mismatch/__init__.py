"""`trl-qurl mismatch`: measure how far quantized rollouts drift from the full-precision policy."""
