"""The demo: a tiny transformer learns three-digit addition from 8-bit rollouts, on a CPU, offline.

`task` defines the task, `warm_start` trains a policy to about 47 % accuracy, `run` continues with
one of our trainers (`algorithms`), `evaluate` measures it and `record` logs one row per rollout;
the picture is that of `trl-qurl report`.
"""
