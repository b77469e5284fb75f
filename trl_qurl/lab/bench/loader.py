"""Weights that are made up, for an engine that takes adapters on vLLM's CPU build. Imported only where that runs."""

from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from trl_qurl.rollout.engine.cpu import with_empty_weights

CPU_DUMMY_FORMAT = "trl-qurl-cpu-dummy"


@register_model_loader(CPU_DUMMY_FORMAT)
class CPUDummyLoader(DummyModelLoader):
    """vLLM's loader of made-up weights, with what adapters on INT8 layers need there (`rollout.engine.cpu`)."""

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:  # noqa: D102
        return with_empty_weights(super().load_model(*args, **kwargs))
