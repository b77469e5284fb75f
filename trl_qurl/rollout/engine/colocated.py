"""vLLM in the trainer's own process."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trl_qurl.rollout.engine.interface import (
    PROBE_TOP,
    Continuation,
    Engine,
    EngineDescription,
    LoadReport,
    TensorMetadata,
    WeightUpdate,
)
from trl_qurl.rollout.errors import SyncError

if TYPE_CHECKING:
    from vllm import LLM


class ColocatedEngine(Engine):
    """
    vLLM in the trainer's own process.

    Args:
        llm: The engine, started with trl-qurl's worker extension.
        sleeps: Whether TRL puts it to sleep between rollouts, so that its key-value cache has to be woken first.
    """

    def __init__(self, llm: "LLM", sleeps: bool = False) -> None:
        self._llm = llm
        self._sleeps = sleeps

    def load_stream(  # noqa: D102
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        metadata: TensorMetadata | None,
        update: WeightUpdate,
    ) -> list[LoadReport]:
        return self._load(update, weights_iterator=named_tensors)

    def load_checkpoint(self, path: Path, update: WeightUpdate) -> list[LoadReport]:  # noqa: D102
        return self._load(update, weights_path=str(path))

    def _load(self, update: WeightUpdate, **source: Any) -> list[LoadReport]:
        reports = self._llm.collective_rpc("load_rollout_weights", kwargs={"update": update._asdict(), **source})
        if not self._llm.reset_prefix_cache():
            raise SyncError(
                "vLLM did not empty its prefix cache, which holds keys and values of the old weights. Resume from the "
                "last checkpoint."
            )
        self._llm.llm_engine.set_weight_version(update.version)
        return [LoadReport(**report) for report in reports]

    def version(self) -> str:  # noqa: D102
        return self._llm.llm_engine.get_weight_version()

    def describe(self) -> EngineDescription:  # noqa: D102
        return EngineDescription(**self._llm.collective_rpc("describe_rollouts")[0])

    def continue_greedily(self, prompts: list[list[int]], steps: int) -> list[Continuation]:  # noqa: D102
        from vllm import SamplingParams

        if self._sleeps:
            self._llm.wake_up(tags=["kv_cache"])  # as TRL does before it generates
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
