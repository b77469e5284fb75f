"""A reload that leaves layers incomplete is only logged by vLLM (report 16); here it is an error.

vLLM returns nothing that says so: it counts the values that each layer received, but resets the
counts before `reload_weights` returns, and does not count what it drops. So its log, partly at
level DEBUG, says when to look. `tests/test_proof.py` and `tests/test_reload.py` fail if a new vLLM
words it differently.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

REPORTS = (16,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None

LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
ALWAYS_LOADED = ("Linear", "VocabParallelEmbedding", "Norm")  # ends of classes' names


@contextmanager
def watched_reload(model: torch.nn.Module) -> Iterator[None]:
    """Raise `RuntimeError` where vLLM only logs that a layer is incorrect after a reload."""
    reload_logger = logging.getLogger(LOGGER)
    level = reload_logger.level
    log = ReloadLog(model, reload_logger.getEffectiveLevel())
    reload_logger.setLevel(logging.DEBUG)
    reload_logger.addFilter(log)
    try:
        yield
    finally:
        reload_logger.removeFilter(log)
        reload_logger.setLevel(level)
    if log.undefined:
        raise RuntimeError(
            "A part of these layers' values is undefined after a reload: "
            f"{', '.join(sorted(set(log.undefined)))}. Leave them unquantized "
            "(quantization_ignore, --ignore), or use a model without them."
        )
    if log.stale:
        raise RuntimeError(
            f"The engine got no new weights for {len(log.stale)} of its layers "
            f"({', '.join(sorted(set(log.stale)))}): the weights that were sent do not belong to "
            "the model that it serves."
        )


class ReloadLog(logging.Filter):
    """Reads vLLM's log of a reload, and hides what the user need not see.

    - "Failed to load weights": a layer received none, so it is stale. Layers with only buffers
      compute theirs and a tied head shares the embedding's weight, so their line is hidden; it
      stays for other layers that need no weights.
    - "Delayed processing": a layer received fewer values than it holds, and vLLM leaves the others
      undefined. The loader sets the vocabulary's to zero, and vLLM keeps those that it computes
      itself.
    - "Excessive loading": a layer seemed full before all its values had arrived, and vLLM dropped
      the rest. Linear layers are exempt: fused ones have a shape for each part, and one is enough.

    Args:
        model: The model that is reloaded.
        level: The lowest level of what the user sees.
    """

    def __init__(self, model: torch.nn.Module, level: int) -> None:
        super().__init__()
        self.stale: list[str] = []  # classes
        self.undefined: list[str] = []
        self._model = model
        self._level = level
        self._vocabulary = _vocabulary_classes(model)
        self._weightless = {"ParallelLMHead"}
        self._computed: dict[torch.nn.Module, int] = {}
        for module in model.modules():
            if hasattr(module, "quant_method"):
                continue
            self._computed[module] = _computed_values(module)
            has_only_buffers = module._buffers and not module._parameters
            if self._computed[module] or has_only_buffers:
                self._weightless.add(type(module).__name__)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        layer, _, event = record.getMessage().partition(": ")
        if event == "Failed to load weights":
            return self._is_shown_without_weights(layer)
        if event == "Delayed processing" and self._has_undefined_values(layer):
            self.undefined.append(layer)
        if event == "Excessive loading" and not layer.endswith("Linear"):
            self.undefined.append(layer)
        return record.levelno >= self._level

    def _has_undefined_values(self, layer: str) -> bool:
        """Return whether a layer of this class lacks values that it does not compute."""
        if layer.endswith(self._vocabulary):
            return False
        for module in self._model.modules():
            # vLLM has reset the counts of layers that it has finished.
            info = get_layerwise_info(module)
            if type(module).__name__ != layer or info.load_numel == 0:
                continue
            if info.load_numel + self._computed.get(module, 0) != info.load_numel_total:
                return True
        return False

    def _is_shown_without_weights(self, layer: str) -> bool:
        if layer in self._weightless:
            return False
        if layer.endswith(ALWAYS_LOADED):
            self.stale.append(layer)
            return False
        return True


def _vocabulary_classes(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the classes of embeddings and heads."""
    classes = {type(module) for module in model.modules()}
    return tuple(each.__name__ for each in classes if "VocabParallelEmbedding" in str(each.__mro__))


def _computed_values(module: torch.nn.Module) -> int:
    """Count the values that a layer computes once and no checkpoint has (positions).

    vLLM counts them among the values to load, and keeps them.
    """
    elements = 0
    for name, buffer in module.named_buffers(recurse=False):
        if name in module._non_persistent_buffers_set:
            elements += buffer.numel()
    return elements
