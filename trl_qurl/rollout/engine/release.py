"""Frees an engine of this process with the trainer that started it, and leaves the process groups alone.

vLLM's own finalizer of an engine destroys the process groups as well: those of the trainer, which goes on in several
processes, and those of an engine that was started since, as where a notebook's cell is run again. Here an engine gives
back its memory, and the process groups are destroyed when the process ends.
"""

import functools
import gc
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


def release_when_deleted(llm: "LLM") -> None:
    """Replace vLLM's finalizer of an engine in this process, just started, by one that spares the process groups."""
    _destroy_process_groups_at_exit()
    client = llm.llm_engine.engine_core
    finalizer = getattr(client, "_finalizer", None)  # the oldest vLLM that TRL takes has none
    if finalizer is not None:
        finalizer.detach()
    weakref.finalize(client, _release, client.engine_core)


def _release(core: Any) -> None:
    """What vLLM's `EngineCore.shutdown` does, but for the process groups."""
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()  # vLLM froze what was there when the engine started; cycles among it could never be freed


@functools.cache
def _destroy_process_groups_at_exit() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    # At exit the finalizer made last runs first: this one runs after those of all engines.
    weakref.finalize(_release, cleanup_dist_env_and_memory)
