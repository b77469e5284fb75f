"""Memory that vLLM's CPU build plans with although it is not free (report 20).

By default, that is 92 % of the machine's memory, and an engine does not start if less is free.
Here its key-value cache gets what the rollouts need, and a part of what is free at most.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

REPORTS = (20,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None

ENGINE_BYTES = 2**30  # memory that an engine process needs in addition to weights, keys, and values
MIN_CACHE = 2**26  # bytes
BLOCK = 128  # tokens of a block in vLLM's cache on CPUs


def cpu_cache_arguments(
    checkpoint: str, arguments: Mapping[str, Any], sequences: int, length: int, share: float = 0.5
) -> dict[str, int]:
    """Return the arguments with which an engine starts in the memory that is free, on a CPU.

    Its cache gets what `sequences` of `length` tokens need, but at most a `share` of what weights
    and engine leave. Empty on a GPU, or if `arguments` name a size. Raises `ValueError` if too
    little memory is free.
    """
    if torch.cuda.is_available() or os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return {}
    if "gpu_memory_utilization" in arguments or "kv_cache_memory_bytes" in arguments:
        return {}
    free = free_memory()
    weights = weight_bytes(checkpoint)
    available = int(share * (free - weights - ENGINE_BYTES))
    if available < MIN_CACHE:
        raise ValueError(
            f"{free / 1e9:.1f} GB of memory are free, but an engine of this model needs "
            f"{weights / 1e9:.1f} GB for weights and about "
            f"{(ENGINE_BYTES + MIN_CACHE / share) / 1e9:.1f} GB for the rest. Stop other "
            "processes, or use a smaller model."
        )
    needed = max(MIN_CACHE, cache_bytes(checkpoint, arguments, sequences, length))
    return {"kv_cache_memory_bytes": min(available, needed)}


def cache_bytes(checkpoint: str, arguments: Mapping[str, Any], sequences: int, length: int) -> int:
    """Return the bytes of the keys and values of sequences.

    There is room for at least one that fills the context.
    """
    from transformers import AutoConfig

    # On a command line, this option has no value.
    trusts = arguments.get("trust_remote_code", False) is not False
    text = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trusts).get_text_config()
    given = str(arguments.get("max_model_len"))
    # vLLM also takes "auto" and "8k".
    context = int(given) if given.isdecimal() else text.max_position_embeddings
    blocks_of_context = _blocks(context)
    blocks_of_sequences = sequences * _blocks(min(context, length))
    blocks = 1 + max(blocks_of_context, blocks_of_sequences)  # vLLM leaves one empty
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    size = 4 if "float32" in str(arguments.get("dtype")) else 2
    return blocks * BLOCK * text.num_hidden_layers * heads * width * 2 * size


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def free_memory() -> int:
    """Return the free memory as vLLM counts it, in bytes, within a container's limit."""
    from vllm.utils.cpu_resource_utils import (
        get_allowed_cpu_list,
        get_memory_node_info,
        get_visible_memory_node,
    )

    nodes = get_visible_memory_node()
    node = get_allowed_cpu_list()[0].numa_node
    if node not in nodes:
        node = nodes[0]
    return get_memory_node_info(node).available_memory


def weight_bytes(directory: str) -> int:
    """Return the size of a checkpoint's weights, in bytes."""
    return sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))
