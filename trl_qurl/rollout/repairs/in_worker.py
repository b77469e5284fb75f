"""The repairs of a reload inside vLLM's worker, put together.

On a CPU, importing this also registers our loader, and asks for AMX before vLLM's first layer runs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import torch
from vllm.platforms import current_platform

REPAIRS: list[ModuleType]
"""Modules with a context manager `around_reload(model)`. The last one is the innermost."""

if current_platform.is_cpu():
    from trl_qurl.rollout.repairs import (
        cpu_adapters,  # noqa: F401, registers a loader
        cpu_amx,
        cpu_experts,
        cpu_int8_scales,
        cpu_tied_head,
    )

    cpu_amx.ask_for_tiles()
    REPAIRS = [cpu_int8_scales, cpu_experts, cpu_tied_head]
else:
    from trl_qurl.rollout.repairs import bias_loader, cache_scales, moved_tensors

    REPAIRS = [cache_scales, bias_loader, moved_tensors]


@contextmanager
def repaired_reload(model: torch.nn.Module) -> Iterator[None]:
    """Repair what vLLM's own reload of a model breaks, if it runs inside the block."""
    with ExitStack() as stack:
        for repair in REPAIRS:
            stack.enter_context(repair.around_reload(model))
        yield
