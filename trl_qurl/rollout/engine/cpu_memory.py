"""Memory for an engine's keys and values on a CPU, as much as there is room for.

vLLM's CPU build plans with 92 % of the machine's memory by default (its `gpu_memory_utilization` is a share of that
there), and does not start where less is free. A number of bytes for keys and values replaces that plan.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

ENGINE_BYTES = 2**30
"""What a process with an engine takes beside weights, keys and values."""

LEAST_CACHE = 2**26


def cpu_cache_arguments(weights: int, given: Mapping[str, Any], share: float = 0.5) -> dict[str, int]:
    """What an engine on this machine's CPU needs in order to start in the memory that is free.

    Args:
        weights: Bytes of the engine's weights.
        given: Arguments of the user for the engine, which come first.
        share: Of what is free beside weights and engine, for keys and values.

    Returns:
        `kv_cache_memory_bytes`; nothing on a GPU, or where the user has chosen.

    Raises:
        ValueError: If too little memory is free, or less than the user's `gpu_memory_utilization` asks for.
    """
    chosen = os.environ.get("VLLM_CPU_KVCACHE_SPACE") or given.get("kv_cache_memory_bytes")
    if torch.cuda.is_available() or chosen:
        return {}
    total, free = cpu_memory()
    state = f"Of {total / 1e9:.1f} GB of memory {free / 1e9:.1f} GB are free, and"
    if (utilization := given.get("gpu_memory_utilization")) is not None:
        if float(utilization) * total > free:
            raise ValueError(
                f"{state} gpu_memory_utilization={utilization}, on a CPU a share of the machine's memory, asks for "
                f"{float(utilization) * total / 1e9:.1f} GB: leave it out, lower it, or end other processes."
            )
        return {}
    cache = int(share * (free - weights - ENGINE_BYTES))
    if cache < LEAST_CACHE:
        raise ValueError(
            f"{state} an engine of this model needs more: {weights / 1e9:.1f} GB for weights and about "
            f"{(ENGINE_BYTES + LEAST_CACHE / share) / 1e9:.1f} GB for the rest. End other processes, or use a smaller "
            "model."
        )
    return {"kv_cache_memory_bytes": cache}


def cpu_memory() -> tuple[int, int]:
    """Bytes of memory that vLLM counts, and how many of them are free, within the limit of a container."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info, get_visible_memory_node

    nodes, node = get_visible_memory_node(), get_allowed_cpu_list()[0].numa_node
    found = get_memory_node_info(node if node in nodes else nodes[0])
    return found.total_memory, found.available_memory
