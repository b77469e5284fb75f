"""Dummy weights for an engine with adapters on vLLM's CPU build. Imported only in such an engine's process."""

from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from trl_qurl.rollout.engine.cpu import with_empty_weights

CPU_DUMMY_FORMAT = "trl-qurl-cpu-dummy"


@register_model_loader(CPU_DUMMY_FORMAT)
class CPUDummyLoader(DummyModelLoader):
    """vLLM's dummy loader, plus the empty weights that adapters on INT8 layers need (`rollout.engine.cpu`)."""

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:  # noqa: D102
        return with_empty_weights(super().load_model(*args, **kwargs))
