"""Turn what vLLM only logs about an incomplete reload into errors.

vLLM returns nothing that says so: it counts the values that each layer received
(`get_layerwise_info`), but resets the counts before `reload_weights` returns, and does not count
what it drops. Its log, partly at level DEBUG, is all there is. `tests/test_proof.py` and
`tests/test_reload.py` fail if a new vLLM words it differently.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def watched_reload(model: torch.nn.Module) -> Iterator[None]:
    """Raise `RuntimeError` where vLLM only logs that a layer is incorrect after a reload.

    - A layer received no new weights. Layers with only buffers compute theirs and a tied head
      shares the embedding's weight, so their log line is dropped; it stays for other layers that
      need no weights.
    - A layer received fewer values than it holds ("delayed"), and vLLM leaves the others
      uninitialized. The loader sets the vocabulary's to zero, and vLLM keeps those that it computes
      itself.
    - A layer seemed full before all its values had arrived, and vLLM dropped the rest
      ("excessive"). Linear layers are exempt: fused ones have a shape for each part, and one is
      enough.
    """
    computed, always_loaded = _computed_values(model), ("Linear", "VocabParallelEmbedding", "Norm")
    vocabulary = tuple(
        type(m).__name__
        for m in model.modules()
        if "VocabParallelEmbedding" in str(type(m).__mro__)
    )
    weightless = ("ParallelLMHead", *computed)
    allowed = {"Delayed processing": vocabulary, "Excessive loading": ("Linear",)}
    stale: list[str] = []
    undefined: list[str] = []
    missing: dict[str, int] = {}  # values that the last loaded layer still lacks, by class

    def should_log(record: logging.LogRecord) -> bool:
        layer, _, event = record.getMessage().partition(": ")
        if progress := re.fullmatch(r"(\d+) / (\d+)", event):
            missing[layer] = int(progress[2]) - int(progress[1])
        is_computed = event == "Delayed processing" and missing.get(layer) == computed.get(layer)
        if event in allowed and not layer.endswith(allowed[event]) and not is_computed:
            undefined.append(layer)
        if event != "Failed to load weights":
            return record.levelno >= visible
        if layer.endswith(always_loaded) and layer not in weightless:
            stale.append(layer)
        return layer not in weightless and not layer.endswith(always_loaded)

    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level, visible = reload_logger.level, reload_logger.getEffectiveLevel()
    reload_logger.setLevel(logging.DEBUG)  # vLLM logs the last two at this level
    reload_logger.addFilter(should_log)
    try:
        yield
    finally:
        reload_logger.removeFilter(should_log)
        reload_logger.setLevel(level)
    if undefined:
        raise RuntimeError(
            "A part of these layers' values is undefined after a reload: "
            f"{', '.join(sorted(set(undefined)))}. A tensor was missing, or this vLLM cannot "
            "reload such layers: use a model without them, or another version of vLLM."
        )
    if stale:
        raise RuntimeError(
            f"The engine got no new weights for {len(stale)} of its layers "
            f"({', '.join(sorted(set(stale)))}): the weights that were sent do not belong to the "
            "model that it serves."
        )


def _computed_values(model: torch.nn.Module) -> dict[str, int]:
    """Count, by class name, the values that a layer computes once and no checkpoint contains
    (positions).

    vLLM counts them among the values to load, and keeps them. Layers that have only buffers are
    included.
    """
    counts: dict[str, int] = {}
    for module in model.modules():
        if not hasattr(module, "quant_method"):
            computed, buffers = (
                module._non_persistent_buffers_set,
                module.named_buffers(recurse=False),
            )
            elements = sum(buffer.numel() for name, buffer in buffers if name in computed)
            if elements or (module._buffers and not module._parameters):
                counts[type(module).__name__] = elements
    return counts
