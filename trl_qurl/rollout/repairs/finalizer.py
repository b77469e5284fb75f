"""An engine that is deleted also destroys the process groups (report 18).

vLLM's finalizer destroys those of the trainer, which continues in several processes, and of an
engine started since then (as when a notebook cell is rerun).
"""

import functools
import gc
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.core import EngineCore

REPORTS = (18,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None


def release_when_deleted(llm: "LLM") -> None:
    """Make a new engine free its memory when it is deleted, and leave the process groups alone.

    These are destroyed when the process ends.
    """
    _destroy_process_groups_at_exit()
    client = llm.llm_engine.engine_core
    client._finalizer.detach()
    weakref.finalize(client, _release, client.engine_core)


def _release(core: "EngineCore") -> None:
    """Do what vLLM's `EngineCore.shutdown` does, except for the process groups."""
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    # vLLM froze all objects when the engine started; cycles among them could never be freed
    gc.unfreeze()


@functools.cache
def _destroy_process_groups_at_exit() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    # At exit, finalizers run newest first: this one runs after those of all engines.
    weakref.finalize(_release, cleanup_dist_env_and_memory)
