"""vLLM in the trainer's own process."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import patch_environment

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout import wire
from trl_qurl.rollout.adapter import engine_rank
from trl_qurl.rollout.checks import hardware
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.repairs.compiled_class import register_uncompiled
from trl_qurl.rollout.repairs.cpu_memory import cpu_cache_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from vllm import LLM, RequestOutput
    from vllm.lora.request import LoRARequest

# tokens of a long prompt: with longer ones, a CPU's cache holds fewer completions at a time
PROMPT = 1024


class ColocatedEngine(wire.Engine):
    """vLLM in the trainer's own process, started with trl-qurl's worker extension."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm

    def load_stream(self, named_tensors: NamedTensors, update: wire.WeightUpdate) -> None:  # noqa: D102
        self.call_workers(
            "load_rollout_weights", update=update._asdict(), weights_iterator=named_tensors
        )
        self.clear_caches()

    def load_adapter(self, path: Path, update: wire.WeightUpdate) -> None:  # noqa: D102
        from vllm.lora.request import LoRARequest

        self._llm.llm_engine.add_lora(LoRARequest(wire.ADAPTER, 1, str(path), load_inplace=True))
        self._llm.adapter = LoRARequest(wire.ADAPTER, 1, str(path))
        self.call_workers("accept_rollout_adapter", update=update._asdict(), path=str(path))
        self.clear_caches()

    def clear_caches(self) -> None:  # noqa: D102
        if not self._llm.reset_prefix_cache():
            raise SyncError(
                "vLLM did not clear the prefix cache of the old weights, because a request still "
                "runs: resume from the last checkpoint in a new process."
            )
        self._llm.llm_engine.reset_encoder_cache()  # image features from the old weights

    def call_workers(self, method: str, **kwargs: Any) -> list[Any]:  # noqa: D102
        return self._llm.collective_rpc(method, kwargs=kwargs)


def with_adapter(engine: type["LLM"], rank: int) -> tuple[type["LLM"], dict[str, Any]]:
    """Return a subclass of vLLM's `LLM` that generates with its `adapter`, and its arguments.

    The adapter has this rank. While the engine sleeps, it keeps the base in host memory.
    """
    from vllm.platforms import current_platform

    class AdapterLLM(engine):
        adapter: "LoRARequest | None" = None

        def generate(self, *args: Any, **kwargs: Any) -> "list[RequestOutput]":
            return super().generate(*args, **{"lora_request": self.adapter, **kwargs})

        def sleep(self, level: int = 1, **kwargs: Any) -> None:
            super().sleep(1, **kwargs)  # TRL's level would discard all weights

    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": engine_rank(rank),
        "max_loras": 1,
    }
    if current_platform.is_cpu():
        arguments["load_format"] = wire.CPU_LOAD_FORMAT
    return AdapterLLM, arguments


def prepare_process(
    model: "PreTrainedModel", weights: WeightStream, arguments: dict[str, Any]
) -> None:
    """Check that vLLM can run a model with these arguments, and prepare this process for it."""
    names = model.config.architectures or [type(model).__name__]
    hardware.check_hardware(
        model.config, weights.plan.schemes, arguments | {"architectures": names}
    )
    register_uncompiled(hardware.transformers_backend(names, arguments))


def as_launched(processes: int) -> AbstractContextManager[None]:
    """Inside the block, a single process has a launcher's variables, which vLLM's start reads.

    TRL sets and keeps them, and the next trainer would take them for a launcher's.
    """
    if processes > 1:
        return nullcontext()
    variables = {"rank": 0, "local_rank": 0, "world_size": 1, "master_port": 0}
    return patch_environment(master_addr=os.environ.get("MASTER_ADDR", "127.0.0.1"), **variables)


def build_engine(
    cls: type["LLM"],
    start: Path | None,
    engine_kwargs: dict[str, Any],
    length: int,
    **trl_kwargs: Any,
) -> "LLM":
    """Build vLLM's `LLM` with TRL's arguments, our starting checkpoint, and the user's extras.

    `length` is that of the longest completion, in tokens.
    """
    if start is not None:
        trl_kwargs["model"] = str(start)
    names = ("max_model_len", "trust_remote_code")
    given = {name: trl_kwargs.get(name, False) for name in names}
    trl_kwargs |= cpu_cache_arguments(
        trl_kwargs["model"],
        given | engine_kwargs,
        sequences=trl_kwargs["max_num_seqs"],
        length=PROMPT + length,
        share=trl_kwargs["gpu_memory_utilization"],
    )
    if os.environ.get("WORLD_SIZE") == "1":
        # One that is free as it is taken: another process may take TRL's before vLLM comes to it.
        os.environ["MASTER_PORT"] = "0"
    return cls(**trl_kwargs | engine_kwargs, worker_extension_cls=wire.WORKER_EXTENSION)
