"""vLLM's transformers backend changes the class of the trainer's model (report 19).

To compile a model, it modifies transformers' class of it. The trainer's model in this process is of
the same class, so without this repair its forward pass fails.
"""

from collections.abc import Mapping

REPORTS = (19,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None


def register_uncompiled(backends: Mapping[str, type]) -> None:
    """Register vLLM's classes that run transformers' code, by name, without `torch.compile`."""
    from vllm.model_executor.models import ModelRegistry

    for name, backend in backends.items():
        uncompiled = {"_decorate_for_torch_compile": lambda model: None}
        ModelRegistry.register_model(name, type(backend.__name__, (backend,), uncompiled))
