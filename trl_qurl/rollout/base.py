"""The frozen base below an adapter: quantized once, for an engine to start from or to compare with a server's."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from trl_qurl.quantization.checkpoint_form import parameter_name
from trl_qurl.quantization.experts import expert_layers
from trl_qurl.quantization.parameters import whole
from trl_qurl.quantization.rounded_base import check_unrounded, round_base
from trl_qurl.quantization.storage import read_tensors
from trl_qurl.quantization.weight_stream import WeightStream
from trl_qurl.rollout.adapter import gathered, plain_name
from trl_qurl.rollout.checks.tensors import base_digests
from trl_qurl.rollout.directory import CheckpointFolder
from trl_qurl.rollout.engine.interface import Digests
from trl_qurl.rollout.settings import RolloutSettings


class FrozenBase:
    """The base of a PEFT model."""

    def __init__(self, model: Any, weights: WeightStream, settings: RolloutSettings) -> None:
        self.checkpoint: Path | None = None  # kept where the trainer's own weights are no longer what it was made from
        self.digests: Digests | None = None  # what a server must have started from; in the main process
        self._model = model
        self._weights = weights
        self._settings = settings
        if settings.round_base:
            check_unrounded(model)
            if expert_layers(weights.layers):
                raise ValueError(
                    "round_base=True does not round experts in the trainer, which the engine would: add "
                    "'re:.*\\.experts\\.' to quantization_ignore, or set round_base=False."
                )

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full-precision parameters, no adapters among them. A collective operation."""
        for name, parameter in self._model.named_parameters():
            if ".lora_" not in name:
                with whole([parameter]):
                    yield parameter_name(plain_name(name)), gathered(parameter)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of its quantized checkpoint. A collective operation.

        Raises `FileNotFoundError` in the main process if the run's own checkpoint is gone.
        """
        if self.checkpoint is not None and self.checkpoint.exists():
            return read_tensors(self.checkpoint)
        if self.checkpoint is not None and PartialState().is_main_process:
            raise FileNotFoundError(
                f"The quantized base of this run is gone from {self.checkpoint}: keep rollout_checkpoint_dir for the "
                "length of the run, or save with merge=True."
            )
        if self.checkpoint is not None:
            return iter(())  # this process may not see it, and needs nothing of it
        return self._weights.tensors(self.parameters(), is_exact=True)

    def write(self, folder: CheckpointFolder) -> Path:
        """Write its quantized checkpoint. A collective operation."""
        path = folder.write("start", self.tensors())
        self.checkpoint = path if self._settings.round_base else None
        return path

    def digest(self, dtype: torch.dtype, is_main: bool) -> None:
        """Take the digests that the checkpoint of a server of this dtype must have. A collective operation."""
        tensors = self.tensors()
        if is_main:
            self.digests = base_digests(tensors, dtype)
        deque(tensors, maxlen=0)

    def round(self, dtype: torch.dtype) -> None:
        """Where the settings ask for it: compute with what its codes stand for in an engine of this dtype."""
        if self._settings.round_base:
            assert self._settings.scheme is not None, "the config asks for a format"
            round_base(self._model.get_base_model(), self._weights.layers, self._settings.scheme, dtype)
