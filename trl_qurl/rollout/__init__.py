"""Rollouts: TRL's backend on quantized weights, syncs with their routes and checks, and engines."""
