"""What the trainer and an engine exchange. Both ends need this file: no TRL, no vLLM.

An engine is vLLM in this process (`engine/colocated.py`) or behind HTTP (`engine/served.py`), with
the same worker.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trl_qurl.quantization.checkpoint_form import NamedTensors

# by name: only the engine imports the class
WORKER_EXTENSION = "trl_qurl.rollout.engine.worker.RolloutWorker"
FRESH = "default"  # version of the weights that an engine starts with
ADAPTER = "trl-qurl-policy"  # name of the trained adapter among the models that an engine serves
# of our loader (`repairs/cpu_adapters.py`), with which INT8 layers take an adapter on a CPU
CPU_LOAD_FORMAT = "trl-qurl-cpu"
# Prefix of every error about weights that a retry cannot fix. A server returns only the text of its
# workers' errors.
NOT_RECEIVED = "The engine did not receive the weights that were sent"
# name, dtype (as `"bfloat16"`) and shape of streamed tensors
TensorMetadata = list[tuple[str, str, list[int]]]
# what the start of an engine says, unless it is eager
COMPILING = ", compiling: about a minute, once"


class WeightUpdate(NamedTuple):
    """One update of an engine's weights."""

    version: str  # name of the weights; the engine reports it from then on
    digest: bool = False  # whether each worker records a digest of every tensor it receives
    metadata: TensorMetadata | None = None  # of a stream to an engine in another process
    noise: str | None = None  # what seeds a server's sampler; a colocated engine has `EngineNoise`


class EngineDescription(NamedTuple):
    """An engine's description of itself."""

    max_model_len: int  # tokens of the longest sequence
    dtype: str | None  # of the unquantized layers, in torch's spelling; `None` if they differ
    kv_cache_dtype: str = "auto"  # dtype of the key-value cache, in vLLM's spelling
    max_lora_rank: int = 0  # maximum rank of an adapter; 0 if the engine accepts none
    runner: str = "V1"  # vLLM's model runner: "V2" on most GPUs, "V1" on CPUs
    gpu: str | None = None  # its UUID


def gpu_uuid() -> str | None:
    """Return the UUID of the GPU that this process uses; `None` on a CPU."""
    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class Engine(ABC):
    """An engine that samples rollouts.

    Loading raises `RuntimeError` if the engine could not load the weights (`ServerError` from a
    server), and `SyncError` if it kept its cache of the old ones.
    """

    @abstractmethod
    def call_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a `RolloutWorker` method in each worker; of several engines, the first answers."""

    @abstractmethod
    def clear_caches(self) -> None:
        """Clear the caches of the old weights; `SyncError` if the engine kept them."""

    @abstractmethod
    def load_stream(self, named_tensors: NamedTensors, update: WeightUpdate) -> None:
        """Replace the weights in place from a stream in checkpoint format."""

    def load_checkpoint(self, path: Path, update: WeightUpdate) -> None:
        """Load weights like `load_stream`, but from a checkpoint directory that the engine sees."""
        self.call_workers("load_rollout_weights", update=update._asdict(), weights_path=str(path))
        self.clear_caches()

    @abstractmethod
    def load_adapter(self, path: Path, update: WeightUpdate) -> None:
        """Load a LoRA adapter like `load_checkpoint`, and generate with it from then on."""

    def check_base(self, sent: dict[str, str]) -> None:  # noqa: B027
        """Raise `SyncError` if an engine of somebody else's has a base with other digests."""

    def compare_digests(self, sent: dict[str, str]) -> float:
        """Raise `SyncError` if a worker received anything but what was sent in the latest load.

        Returns the seconds that the slowest worker took for its digests, which were part of that
        load. Workers compare, because with `--data-parallel-size` vLLM returns the first engine's
        answer and others' errors.
        """
        # text, from a server
        return max(map(float, self.call_workers("compare_rollout_digests", sent=sent)))

    def version(self) -> str:
        """Return the version of the weights that the workers hold; all versions, if they differ."""
        return " and ".join(sorted(set(self.call_workers("rollout_version"))))

    def describe(self) -> EngineDescription:
        """Return the engine's description of itself."""
        return EngineDescription(**self.call_workers("describe_rollouts")[0])
