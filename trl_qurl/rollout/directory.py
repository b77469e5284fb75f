"""The directory through which a run's processes pass checkpoints to their engine."""

import shutil
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from trl_qurl.quantization.checkpoint import CheckpointWriter
from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.quantization.files import PrivateDirectory
from trl_qurl.rollout.group import TOGETHER


class CheckpointFolder:
    """A private directory that all processes of a run share.

    One process writes for a server; for colocated engines, one process on each node writes. All
    know the path, and wait for the writer.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        writer: CheckpointWriter,
        parent: str | None,
        nbytes: int,
        is_served: bool,
    ) -> None:
        self._accelerator = accelerator
        self.writer = writer
        if is_served:
            writing_process = 0
        else:
            writing_process = accelerator.process_index - accelerator.local_process_index
        self.is_writer = accelerator.process_index == writing_process
        self._directory: PrivateDirectory | None = None

        def create() -> None:
            if self.is_writer:
                self._directory = PrivateDirectory(parent, nbytes)

        TOGETHER.run(create)
        own_path = None if self._directory is None else self._directory.path
        paths: list[Path] = gather_object([own_path])
        self.path = paths[writing_process]

    def write(
        self,
        name: str,
        rollout_tensors: NamedTensors,
        write: Callable[[NamedTensors, Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint from tensors in its format, or call `write` on them.

        A collective operation.
        """
        path = self.path / name
        save = write or self.writer.write
        # Collective operations make the tensors.
        drain: Callable[[], object] = partial(deque, rollout_tensors, maxlen=0)

        def act() -> None:
            if self._directory is None:
                drain()
            else:
                self._directory.make()
                save(rollout_tensors, path)

        TOGETHER.run(act, join=drain)
        self._accelerator.wait_for_everyone()
        return path

    def remove(self, name: str) -> None:
        """Remove a checkpoint, if it exists, once no process reads it anymore.

        A collective operation.
        """
        self._accelerator.wait_for_everyone()
        if self.is_writer:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def drop_weights(self, name: str) -> None:
        """Remove weights once the engine has loaded them: the directory may be in memory."""
        if self.is_writer:
            for weights in (self.path / name).glob("*.safetensors"):
                weights.unlink()
