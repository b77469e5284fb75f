"""Size an engine's key-value cache on a CPU by the memory that is free.

vLLM's CPU build plans with 92 % of the machine's memory by default (`gpu_memory_utilization` is a share of that
memory there), and does not start if less is free. A size in bytes for keys and values replaces that plan.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

ENGINE_BYTES = 2**30
"""Memory that an engine process needs in addition to weights, keys, and values."""

MIN_CACHE = 2**26


def cpu_cache_arguments(weights: int, user_arguments: Mapping[str, Any], share: float = 0.5) -> dict[str, int]:
    """Return the arguments with which an engine on this machine's CPU starts in the memory that is free.

    Args:
        weights: Size of the engine's weights, in bytes.
        user_arguments: The user's arguments for the engine, which take precedence.
        share: Share, for keys and values, of the memory left after weights and engine.

    Returns:
        `kv_cache_memory_bytes`; empty on a GPU, or if the user has chosen a size.

    Raises:
        ValueError: Too little memory is free, or less than the user's `gpu_memory_utilization` requires.
    """
    user_size = os.environ.get("VLLM_CPU_KVCACHE_SPACE") or user_arguments.get("kv_cache_memory_bytes")
    if torch.cuda.is_available() or user_size:
        return {}
    total, free = cpu_memory()
    state = f"Of {total / 1e9:.1f} GB of memory {free / 1e9:.1f} GB are free, but"
    if (utilization := user_arguments.get("gpu_memory_utilization")) is not None:
        if float(utilization) * total > free:
            raise ValueError(
                f"{state} gpu_memory_utilization={utilization} (on a CPU, a share of the machine's memory) requires "
                f"{float(utilization) * total / 1e9:.1f} GB: remove it, lower it, or stop other processes."
            )
        return {}
    cache = int(share * (free - weights - ENGINE_BYTES))
    if cache < MIN_CACHE:
        raise ValueError(
            f"{state} an engine of this model needs more: {weights / 1e9:.1f} GB for weights and about "
            f"{(ENGINE_BYTES + MIN_CACHE / share) / 1e9:.1f} GB for the rest. Stop other processes, or use a smaller "
            "model."
        )
    return {"kv_cache_memory_bytes": cache}


def cpu_memory() -> tuple[int, int]:
    """Return total and free memory as vLLM counts them, in bytes, within a container's limit."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info, get_visible_memory_node

    nodes, node = get_visible_memory_node(), get_allowed_cpu_list()[0].numa_node
    memory = get_memory_node_info(node if node in nodes else nodes[0])
    return memory.total_memory, memory.available_memory
