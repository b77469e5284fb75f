"""What runs inside vLLM's workers: how new weights enter a layer.

vLLM takes this class by name (`--worker-extension-cls`, its official way to add a worker method). Neither it nor what
it imports needs TRL, so the engine may run in an environment without it. On CUDA, vLLM's own reload does the work. On
CPU, `cpu` adds fixes to it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms import current_platform

from trl_qurl.quantization.storage import read_tensors, tensor_shapes
from trl_qurl.rollout.checks.tensors import DigestRecorder, HeldTensors
from trl_qurl.rollout.engine.interface import WeightUpdate

if current_platform.is_cpu():
    from trl_qurl.rollout.engine import cpu


class RolloutWorker:
    """Methods that vLLM mixes into its worker class, whose attributes these are."""

    reload_weights: Callable[..., None]
    get_model: Callable[[], torch.nn.Module]
    vllm_config: VllmConfig
    weight_transfer_engine: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, list]], None]
    finish_weight_update: Callable[[], None]

    def load_rollout_weights(
        self,
        update: Mapping[str, Any],
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        announced: dict[str, list] | None = None,
    ) -> dict[str, object]:
        """
        Replace weights in place by checkpoint-format tensors from one of three sources.

        Args:
            update: The fields of a `WeightUpdate`.
            weights_iterator: `(name, tensor)` pairs; only inside the trainer's own process.
            weights_path: Checkpoint directory on a file system that this worker sees.
            announced: `names`, `dtype_names` and `shapes` of what will come over vLLM's weight transfer.

        Returns:
            The fields of a `LoadReport`.

        Raises:
            RuntimeError: A layer was left with its old weights, or does not hold what came in for it; these are
                another model's weights; or an earlier load failed.
        """
        wanted = WeightUpdate(**update)
        self._refuse_other_model(weights_path, announced, wanted.partial)
        if getattr(self, "rollout_load_failed", False):
            raise RuntimeError(
                "An earlier load of weights failed halfway, after which vLLM cannot load any: start the server again."
            )
        self.rollout_load_failed = True
        held = HeldTensors(self.get_model(), enabled=wanted.digest)
        with _watched_reload(wanted.partial):
            digests = self._load_from(weights_iterator, weights_path, announced, wanted.digest, held)
        self.rollout_load_failed = False
        compared = held.compare()
        return {"version": wanted.version, "digests": digests, "held": len(compared)}

    def _load_from(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None,
        weights_path: str | None,
        announced: dict[str, list] | None,
        digest: bool,
        held: HeldTensors,
    ) -> dict[str, str]:
        """Load from the source that is given, and return digests of what came."""
        if announced is not None:
            return self._receive(announced, digest, held)
        if weights_iterator is None:
            weights_iterator = read_tensors(Path(weights_path or ""))
        received = DigestRecorder(weights_iterator, enabled=digest)
        if current_platform.is_cpu():
            cpu.use_reloadable_int8_kernels(self.get_model())
        self.reload_weights(weights_iterator=held.watch(received))
        if current_platform.is_cpu():
            cpu.repack_output_head(self.get_model())
            cpu.restore_released_weights(self.get_model())
        return received.digests

    def _refuse_other_model(self, weights_path: str | None, announced: dict[str, list] | None, partial: bool) -> None:
        """
        Refuse weights of another model before any layer is touched.

        Names and shapes are compared with those of the quantized checkpoint that the server started from. Unquantized
        ones are not: a model's own checkpoint may name its tensors otherwise than its parameters.

        Raises:
            RuntimeError: If they differ.
        """
        start = Path(self.vllm_config.model_config.model)
        if self.vllm_config.quant_config is None or not any(start.glob("*.safetensors")):
            return
        if announced is not None:
            sent = {name: list(shape) for name, shape in zip(announced["names"], announced["shapes"], strict=True)}
        elif weights_path is not None:
            sent = tensor_shapes(Path(weights_path))
        else:
            return  # the trainer's own engine, started from the trainer's own model
        served = tensor_shapes(start)
        expected = sent.keys() if partial else sent.keys() | served.keys()
        differing = sorted(name for name in expected if sent.get(name) != served.get(name))
        if differing:
            name = differing[0]
            raise RuntimeError(
                f"These are weights of another model than the one served: {len(differing)} tensors differ, first "
                f"{name} (shape {sent.get(name)} instead of {served.get(name)}). Nothing was loaded."
            )

    def _receive(self, announced: dict[str, list], digest: bool, held: HeldTensors) -> dict[str, str]:
        """Receive one update from vLLM's weight transfer, and return digests of its tensors, if asked for."""
        self.start_weight_update()
        engine = self.weight_transfer_engine
        received = _RecordingModel(engine.model, digest, held)
        engine.set_weight_update_target(received, engine.model_config)
        self.update_weights(announced)
        engine.reset_weight_update_target()
        self.finish_weight_update()
        return received.digests

    def describe_rollouts(self) -> dict[str, object]:
        """
        What the trainer has to know about this worker.

        Returns:
            The fields of an `EngineDescription`; `format` is another method's name where it is not compressed-tensors.
        """
        quantization = self.vllm_config.quant_config
        description: dict[str, object] = {"format": None, "ignore": []}
        if isinstance(quantization, CompressedTensorsConfig):
            description = {"format": quantization.quant_format, "ignore": list(quantization.ignore)}
        elif quantization is not None:
            description["format"] = quantization.get_name()
        return description | {
            "block_size": self.vllm_config.cache_config.block_size,
            "max_model_len": self.vllm_config.model_config.max_model_len,
            "dtype": self._common_dtype(),
        }

    def _common_dtype(self) -> str | None:
        dtypes = {
            parameter.dtype
            for layer in self.get_model().modules()
            if getattr(layer, "scheme", None) is None  # vLLM's quantized layers have one
            for parameter in layer.parameters(recurse=False)
            if parameter.is_floating_point()
        }
        return str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None


class _RecordingModel:
    """What a weight transfer engine needs of a model, with a digest of every tensor that arrives."""

    def __init__(self, model: torch.nn.Module, digest: bool, held: HeldTensors) -> None:
        self._model = model
        self._digest = digest
        self._held = held
        self.digests: dict[str, str] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Pass one batch of tensors on to the model."""
        received = DigestRecorder(weights, enabled=self._digest)
        loaded = self._model.load_weights(self._held.watch(received))  # type: ignore[operator]
        self.digests |= received.digests
        return loaded


@contextmanager
def _watched_reload(partial: bool) -> Iterator[None]:
    """
    Turn vLLM's log line about a layer that got no new weights into an error.

    vLLM only logs it and continues with the old weights. For a layer that has weights in every checkpoint that is an
    error. Rotary embeddings compute theirs and a tied head shares the embedding's, so their line is dropped. About any
    other layer, vLLM's own warning stays.

    Args:
        partial: Whether layers may stay without new weights.

    Raises:
        RuntimeError: At the end of the block, if such a layer was reported.
    """
    always_loaded = ("Linear", "VocabParallelEmbedding", "Norm")
    weightless = ("RotaryEmbedding", "RotaryEmbeddingInterleaved", "ParallelLMHead")
    stale: list[str] = []

    def is_worth_a_line(record: logging.LogRecord) -> bool:
        layer, _, event = record.getMessage().partition(": ")
        if event != "Failed to load weights":
            return True
        if layer.endswith(always_loaded):
            stale.append(layer)
        return not layer.endswith(always_loaded + weightless)

    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = reload_logger.level
    reload_logger.setLevel(logging.WARNING)  # a quieter VLLM_LOGGING_LEVEL would keep the report from us as well
    reload_logger.addFilter(is_worth_a_line)
    try:
        yield
    finally:
        reload_logger.removeFilter(is_worth_a_line)
        reload_logger.setLevel(level)
    if stale and not partial:
        raise RuntimeError(
            f"The engine got no new weights for {len(stale)} of its layers ({', '.join(sorted(set(stale)))}) and "
            "still holds the old ones: the checkpoint or stream does not belong to the model that it serves."
        )
