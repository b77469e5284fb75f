"""The demo: a tiny transformer learns three-digit addition from 8-bit rollouts, on a CPU, offline.

`task` defines the task, `warm_start` trains a policy to about 47 % accuracy, `run` continues with
one of our trainers (`algorithms`), `evaluate` measures it, `record` logs one row per rollout, and
`outcome` compares the run with a stored one in 16 bits.
"""
