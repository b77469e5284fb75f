"""The two places an engine can live, behind one interface: load weights, name their version, answer a probe.

Loading always ends in `RolloutWorker.load_rollout_weights`, so the same code checks a tensor on its way in wherever
the engine runs. What differs is how a call gets there.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_qurl.quantization.stream import NamedTensors
from trl_qurl.rollout.checks.probe import Continuation
from trl_qurl.rollout.engine.client import RolloutVLLMClient
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.stream import TensorMetadata

if TYPE_CHECKING:
    from vllm import LLM

PROBE_TOP = 20
"""Likeliest tokens whose log-probabilities a probe compares. vLLM's default `max_logprobs`."""


class EngineDescription(NamedTuple):
    """What an engine says about itself."""

    format: str | None  # compressed-tensors' name for the way codes are stored
    ignore: list[str]  # patterns of the modules kept in full precision
    block_size: int  # tokens per block of the key-value cache
    max_model_len: int  # tokens of the longest sequence
    dtype: str | None  # of layers that are not quantized, as torch calls it; `None` where they differ


class LoadReport(NamedTuple):
    """What one worker says about the weights it has just loaded."""

    version: str
    digests: dict[str, str]  # tensor name to digest, empty if none were asked for
    held: int  # parameters found in the model as they came in, 0 if no digests were asked for


class Engine(ABC):
    """An engine that rollouts are sampled from."""

    @abstractmethod
    def load(
        self,
        source: NamedTensors | Path,
        version: str,
        digest: bool,
        metadata: TensorMetadata | None = None,
        partial: bool = False,
    ) -> list[LoadReport]:
        """
        Replace the weights in place and forget what was cached under the old ones.

        Args:
            source: A stream of tensors, or a checkpoint directory that the engine sees.
            version: Name of these weights.
            digest: Whether each worker reports digests of what it received.
            metadata: Of the tensors of a stream to a server, in order.
            partial: Whether layers that nothing comes for keep what they hold; otherwise that is an error.

        Returns:
            One report per worker.

        Raises:
            RuntimeError: The engine could not load them (`ServerError` from a server).
            SyncError: It kept what it had cached.
        """

    @abstractmethod
    def version(self) -> str:
        """Name of the weights the engine holds, by vLLM's own account."""

    @abstractmethod
    def continue_greedily(self, prompts: list[list[int]], steps: int) -> list[Continuation]:
        """Continue each prompt by the likeliest tokens, whatever they are, without touching any random state."""

    @abstractmethod
    def describe(self) -> EngineDescription:
        """What the engine says about itself."""


class ColocatedEngine(Engine):
    """vLLM in the trainer's own process."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm

    def load(  # noqa: D102
        self,
        source: NamedTensors | Path,
        version: str,
        digest: bool,
        metadata: TensorMetadata | None = None,
        partial: bool = False,
    ) -> list[LoadReport]:
        place = {"weights_path": str(source)} if isinstance(source, Path) else {"weights_iterator": source}
        reports = self._llm.collective_rpc(
            "load_rollout_weights", kwargs={**place, "version": version, "digest": digest, "partial": partial}
        )
        if not self._llm.reset_prefix_cache():
            raise SyncError(
                "vLLM did not empty its prefix cache, which holds keys and values of the old weights: "
                "resume from the last checkpoint."
            )
        self._llm.llm_engine.set_weight_version(version)
        return [LoadReport(**report) for report in reports]

    def version(self) -> str:  # noqa: D102
        return self._llm.llm_engine.get_weight_version()

    def describe(self) -> EngineDescription:  # noqa: D102
        return EngineDescription(**self._llm.collective_rpc("describe_rollouts")[0])

    def continue_greedily(self, prompts: list[list[int]], steps: int) -> list[Continuation]:  # noqa: D102
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=steps, temperature=0.0, logprobs=PROBE_TOP, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        return [
            Continuation(
                list(completion.token_ids),
                [{token: entry.logprob for token, entry in entries.items()} for entries in completion.logprobs],
            )
            for completion in completions
        ]


class ServedEngine(Engine):
    """vLLM behind its HTTP server."""

    def __init__(self, client: RolloutVLLMClient) -> None:
        self._client = client

    def load(  # noqa: D102
        self,
        source: NamedTensors | Path,
        version: str,
        digest: bool,
        metadata: TensorMetadata | None = None,
        partial: bool = False,
    ) -> list[LoadReport]:
        if isinstance(source, Path):
            reports = self._client.load_checkpoint(str(source), version, digest, partial)
        else:
            reports = self._client.load_stream(source, metadata or [], version, digest, partial)
        return [LoadReport(**report) for report in reports]

    def version(self) -> str:  # noqa: D102
        return self._client.weight_version()

    def describe(self) -> EngineDescription:  # noqa: D102
        return EngineDescription(**self._client.describe())

    def continue_greedily(self, prompts: list[list[int]], steps: int) -> list[Continuation]:  # noqa: D102
        output: dict[str, Any] = self._client.generate(
            prompts, max_tokens=steps, temperature=0.0, logprobs=PROBE_TOP, generation_kwargs={"ignore_eos": True}
        )
        answers = zip(output["completion_ids"], output["logprob_token_ids"], output["logprobs"], strict=True)
        return [
            Continuation(
                completion,
                [dict(zip(names, values, strict=True)) for names, values in zip(tokens, logps, strict=True)],
            )
            for completion, tokens, logps in answers
        ]
