"""What the trainer asks of an engine, and the values that cross between the two.

An engine is vLLM in the trainer's process (`colocated`) or behind HTTP (`served`). In both, loading ends in
`RolloutWorker.load_rollout_weights`, so the same code checks each tensor on its way in. This file needs neither TRL
nor vLLM: the worker imports it too.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

PROBE_TOP = 20
"""Likeliest tokens whose log-probabilities a probe compares: vLLM's default `max_logprobs`."""

TensorMetadata = list[tuple[str, str, list[int]]]
"""Name, dtype (as vLLM writes it, `"bfloat16"`) and shape of each tensor of a stream, in order."""


class WeightUpdate(NamedTuple):
    """
    One update of an engine's weights, as every layer between trainer and engine sees it.

    Attributes:
        version: Name of the weights, which the engine reports from then on.
        digest: Whether each worker reports a digest of every tensor it receives.
        partial: Whether layers that receive nothing keep what they hold; otherwise that is an error.
    """

    version: str
    digest: bool = False
    partial: bool = False


class LoadReport(NamedTuple):
    """
    What one worker says about the weights it has just loaded.

    Attributes:
        version: Name of the weights.
        digests: Tensor name to digest; empty if none were asked for.
        held: Parameters found in the model as they came in; 0 if no digests were asked for.
    """

    version: str
    digests: dict[str, str]
    held: int


class EngineDescription(NamedTuple):
    """
    What an engine says about itself.

    Attributes:
        format: compressed-tensors' name for how the codes are stored; `None` for unquantized weights.
        ignore: Patterns of the modules kept in full precision.
        block_size: Tokens per block of the key-value cache.
        max_model_len: Tokens of the longest sequence.
        dtype: Of the layers that are not quantized, as torch calls it; `None` where they differ.
    """

    format: str | None
    ignore: list[str]
    block_size: int
    max_model_len: int
    dtype: str | None


class Continuation(NamedTuple):
    """
    A greedy continuation of a prompt.

    Attributes:
        tokens: The tokens.
        logps: At each of them, the likeliest tokens' log-probabilities, in nats.
    """

    tokens: list[int]
    logps: list[dict[int, float]]


class Engine(ABC):
    """An engine that rollouts are sampled from."""

    @abstractmethod
    def load_stream(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        metadata: TensorMetadata | None,
        update: WeightUpdate,
    ) -> list[LoadReport]:
        """
        Replace the weights in place from a stream, and drop what was cached under the old ones.

        Args:
            named_tensors: The stream, in checkpoint format.
            metadata: What the stream will hold, for an engine in another process; `None` otherwise.
            update: Name and mode of this update.

        Returns:
            One report per worker.

        Raises:
            RuntimeError: The engine could not load them (`ServerError` from a server).
            SyncError: The stream is not what was announced, or the engine kept its cache.
        """

    @abstractmethod
    def load_checkpoint(self, path: Path, update: WeightUpdate) -> list[LoadReport]:
        """
        Replace the weights in place from a checkpoint directory that the engine sees; otherwise as `load_stream`.

        Args:
            path: The directory.
            update: Name and mode of this update.

        Returns:
            One report per worker.
        """

    @abstractmethod
    def version(self) -> str:
        """Name of the weights that the engine holds, according to vLLM."""

    @abstractmethod
    def continue_greedily(self, prompts: list[list[int]], steps: int) -> list[Continuation]:
        """
        Continue each prompt by its likeliest tokens, end tokens included, without touching any random state.

        Args:
            prompts: Token lists.
            steps: Tokens to add.
        """

    @abstractmethod
    def describe(self) -> EngineDescription:
        """What the engine says about itself."""
