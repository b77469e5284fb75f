"""Do quantized rollouts pay off? Measures costs on this machine and predicts the time of a training
step.
"""
