"""The frozen base of an adapter: quantized once, to start an engine from or to compare with a server's base."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from trl_qurl.quantization.checkpoint_form import expert_layers, parameter_name, whole
from trl_qurl.quantization.fake_quantization import check_unrounded, round_base
from trl_qurl.quantization.storage import read_tensors
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.adapter import gathered, plain_name
from trl_qurl.rollout.checks.tensors import base_digests
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.engine.interface import Digests
from trl_qurl.rollout.settings import RolloutSettings


class FrozenBase:
    """The frozen base of a PEFT model."""

    def __init__(self, model: Any, weights: WeightStream, settings: RolloutSettings) -> None:
        self.checkpoint: Path | None = None  # set by `round_base`, which overwrites the weights it was made from
        self.digests: Digests | None = None  # a server must have started from these; main process only
        self._model = model
        self._weights = weights
        self._settings = settings
        if settings.round_base:
            check_unrounded(model)
            if expert_layers(weights.layers):
                raise ValueError(
                    "round_base=True does not round experts in the trainer, but the engine would: add "
                    "'re:.*\\.experts\\.' to quantization_ignore, or set round_base=False."
                )

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full-precision parameters without adapters. A collective operation."""
        for name, parameter in self._model.named_parameters():
            if ".lora_" not in name:
                with whole([parameter]):
                    yield parameter_name(plain_name(name)), gathered(parameter)

    def quantized_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the tensors of the quantized checkpoint. A collective operation.

        Raises `FileNotFoundError` in the main process if the run's own checkpoint is gone.
        """
        if self.checkpoint is not None and self.checkpoint.exists():
            return read_tensors(self.checkpoint)
        if self.checkpoint is not None and PartialState().is_main_process:
            raise FileNotFoundError(
                f"The quantized base of this run is gone from {self.checkpoint}: keep rollout_checkpoint_dir "
                "until the run ends, or save with merge=True."
            )
        if self.checkpoint is not None:
            return iter(())  # this process may not see the file and does not need it
        return self._weights.tensors(self.parameters(), is_exact=True)

    def write(self, folder: CheckpointFolder) -> Path:
        """Write the quantized checkpoint. A collective operation."""
        path = folder.write("start", self.quantized_tensors())
        self.checkpoint = path if self._settings.round_base else None
        return path

    def digest(self, dtype: torch.dtype, is_main: bool) -> None:
        """Record the digests that a server of this dtype must have for its base. A collective operation."""
        tensors = self.quantized_tensors()
        if is_main:
            self.digests = base_digests(tensors, dtype)
        deque(tensors, maxlen=0)

    def round(self, dtype: torch.dtype) -> None:
        """With `round_base`, round the weights to the values that an engine of this dtype computes with."""
        if self._settings.round_base:
            assert self._settings.scheme is not None, "the config requires a format"
            round_base(self._model.get_base_model(), self._weights.layers, self._settings.scheme, dtype)
