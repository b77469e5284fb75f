"""What the trainer asks of an engine, and the values that cross between the two.

An engine is vLLM in the trainer's process (`colocated`) or behind HTTP (`served`). In both, loading ends in
`RolloutWorker.load_rollout_weights`, so the same code checks each tensor on its way in. This file needs neither TRL
nor vLLM: the worker imports it too.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trl_qurl.quantization.stream import NamedTensors

FRESH = "default"
"""Name of the weights that an engine starts with."""

ADAPTER = "trl-qurl-policy"
"""Name of the adapter that is trained, beside the names of what an engine serves."""

CPU_LOAD_FORMAT = "trl-qurl-cpu"
"""vLLM's name for our loader of models, with which its CPU build takes an adapter on INT8 layers (`cpu`)."""

REFUSED = "Nothing was loaded."
"""How a worker ends its refusal of weights, which it would refuse again."""

NOT_RECEIVED = "The engine did not receive the weights that were sent"
"""How a worker, or the trainer, begins to say that digests differ."""

PROBE_TOP = 20
"""Likeliest tokens whose log-probabilities a probe compares: vLLM's default `max_logprobs`."""

Digests = dict[str, str]
"""Digests of the tensors that one worker has just received, by tensor name; empty if none were asked for."""

TensorMetadata = list[tuple[str, str, list[int]]]
"""Name, dtype (as vLLM writes it, `"bfloat16"`) and shape of each tensor of a stream, in order."""


class WeightUpdate(NamedTuple):
    """One update of an engine's weights, as every layer between trainer and engine sees it."""

    version: str  # name of the weights, which the engine reports from then on
    digest: bool = False  # whether each worker reports a digest of every tensor it receives


class EngineDescription(NamedTuple):
    """What an engine says about itself."""

    format: str | None  # a scheme's `served_as`; `None` for unquantized weights
    ignore: list[str]  # patterns of the modules kept in full precision
    block_size: int  # tokens per block of the key-value cache
    max_model_len: int  # tokens of the longest sequence
    dtype: str | None  # of the layers that are not quantized, as torch calls it; `None` where they differ
    kv_cache_dtype: str = "auto"  # of the key-value cache, as vLLM calls it
    max_lora_rank: int = 0  # highest rank of an adapter; 0 if the engine takes none


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The dtype that an engine names in its description."""
    return getattr(torch, name) if name else None


class Continuation(NamedTuple):
    """A greedy continuation of a prompt."""

    tokens: list[int]
    logps: list[dict[int, float]]  # at each token, the log-probabilities of the likeliest ones, in nats


class Engine(ABC):
    """An engine that rollouts are sampled from."""

    @abstractmethod
    def load_stream(
        self, named_tensors: NamedTensors, metadata: TensorMetadata, update: WeightUpdate
    ) -> list[Digests]:
        """Replace the weights in place from a stream in checkpoint format, and drop what the old ones left cached.

        An engine in another process needs `metadata`, what the stream will hold. Returns the digests of each worker.
        Raises `RuntimeError` if the engine could not load the weights (`ServerError` from a server), and `SyncError`
        if the stream is not what was announced or the engine kept its cache.
        """

    @abstractmethod
    def load_checkpoint(self, path: Path, update: WeightUpdate) -> list[Digests]:
        """As `load_stream`, from a checkpoint directory that the engine sees."""

    @abstractmethod
    def load_adapter(self, path: Path, update: WeightUpdate) -> list[Digests]:
        """As `load_checkpoint`, for a LoRA adapter, with which everything is generated from then on."""

    def check_base(self, sent: Digests) -> None:  # noqa: B027
        """Raise `SyncError` if an engine that this run did not start has another base than one with these digests."""

    def compare_digests(self, sent: Digests) -> None:  # noqa: B027
        """Raise `SyncError` if a worker whose digests are not returned received something else than was sent."""

    @abstractmethod
    def continue_greedily(self, prompts: list[list[int]], steps: int) -> list[Continuation]:
        """Continue each prompt by its likeliest tokens, end tokens included, without touching any random state."""

    @abstractmethod
    def call_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of `RolloutWorker` in each worker of the engine; of several engines the first one answers."""

    def version(self) -> str:
        """Name of the weights that the engine's workers hold; all names, if they differ."""
        return " and ".join(sorted(set(self.call_workers("rollout_version"))))

    def describe(self) -> EngineDescription:
        """What the engine says about itself."""
        return EngineDescription(**self.call_workers("describe_rollouts")[0])
