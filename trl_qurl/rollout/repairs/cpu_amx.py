"""vLLM uses AMX without asking the kernel, which ends its process (report 24).

Linux allows the tiles of AMX to processes that have asked for them. oneDNN asks when a large layer
runs for the first time; vLLM's attention, in bfloat16, never does. So an engine of a small model
dies of `Illegal instruction` when it first generates.
"""

import torch

REPORTS = (24,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None


def ask_for_tiles() -> None:
    """Ask the kernel to allow AMX in this process, if the CPU has it."""
    if torch.cpu.get_capabilities().get("amx_tile"):
        torch.cpu._init_amx()
