"""vLLM's code for GPUs on a machine that has none: everything that Python decides, and nothing
that a kernel computes.

Real: trl-qurl's stream, checkpoints and worker; vLLM's platform class for CUDA, its model runners,
models, loader, choice of kernels, processing of weights and reload. Doubles: what answers for the
device (`platform`), and the compiled operators that loading calls (`platform`, `humming`). They
keep shapes, dtypes, addresses and the order of values. Tensors are on the host, so devices,
streams, memory and what kernels compute are out of reach; `tests/test_gpu.py` has those.

`engine` starts and reloads, `tensors` compares, and `python -m simulated_gpu` runs cases and writes
the table in docs/choosing.md. A verdict that hardware contradicts is a fault of the doubles:
correct it there.
"""
