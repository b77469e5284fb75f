"""The demonstration: a tiny transformer learns three-digit addition from 8-bit rollouts, on CPU, without a network.

`task` says what is asked, `model` how big the policy is, `warm_start` brings it to about 47 %, `run` trains it with
`QuRLGRPOTrainer`, `evaluate` measures it, `record` keeps one row per rollout and `figure` draws them.
"""
