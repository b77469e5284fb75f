"""What runs inside vLLM's workers: how new weights enter a layer.

vLLM takes this class by name (`--worker-extension-cls`, its official way to add a worker method). Neither it nor what
it imports needs TRL, so the engine may live in an environment without it. On CUDA it is vLLM's own reload. On CPU,
`cpu_repairs` adds to it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms import current_platform

from trl_qurl.quantization.storage import read_tensors
from trl_qurl.rollout.proof import DigestRecorder

if current_platform.is_cpu():
    from trl_qurl.rollout import cpu_repairs


class RolloutWorker:
    """Methods that vLLM mixes into its worker class, whose attributes the first three are."""

    reload_weights: Callable[..., None]
    get_model: Callable[[], torch.nn.Module]
    vllm_config: VllmConfig

    def load_rollout_weights(
        self,
        weights_iterator: Iterable[tuple[str, torch.Tensor]] | None = None,
        weights_path: str | None = None,
        version: str = "",
        digest: bool = False,
    ) -> dict[str, object]:
        """
        Replace all weights in place by checkpoint-format tensors, from a stream or from a directory.

        Args:
            weights_iterator: `(name, tensor)` pairs; only inside the trainer's own process.
            weights_path: Checkpoint directory on a file system that this worker sees.
            version: Name of these weights.
            digest: Whether to compute a digest of every tensor on its way in.

        Returns:
            `version` as given, once the weights are loaded, and `digests`, tensor name to digest.

        Raises:
            RuntimeError: If a layer was left with its old weights.
        """
        if weights_iterator is None:
            weights_iterator = read_tensors(Path(weights_path or ""))
        received = DigestRecorder(weights_iterator, enabled=digest)
        if current_platform.is_cpu():
            cpu_repairs.use_reloadable_int8_kernels(self.get_model())
        with _watched_reload():
            self.reload_weights(weights_iterator=received)
        if current_platform.is_cpu():
            cpu_repairs.repack_output_head(self.get_model())
        return {"version": version, "digests": received.digests}

    def rollout_format(self) -> dict[str, object]:
        """
        How the layers of this worker are quantized.

        Returns:
            `format`: compressed-tensors' name for the way codes are stored, another method's name, or `None`;
            `ignore`: patterns of the modules kept in full precision.
        """
        quantization = self.vllm_config.quant_config
        if quantization is None:
            return {"format": None, "ignore": []}
        if not isinstance(quantization, CompressedTensorsConfig):
            return {"format": quantization.get_name(), "ignore": []}
        return {"format": quantization.quant_format, "ignore": list(quantization.ignore)}


@contextmanager
def _watched_reload() -> Iterator[None]:
    """
    Turn vLLM's report of a layer that got no new weights into what it means.

    vLLM only logs it, and goes on with the old weights. For a layer that has weights in every checkpoint that is an
    error; rotary embeddings compute theirs and a tied head shares the embedding's, so for them it is not worth a line;
    about any other layer vLLM's own warning is left to speak.

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
    if stale:
        raise RuntimeError(
            f"The engine got no new weights for {len(stale)} of its layers ({', '.join(sorted(set(stale)))}) and "
            "still holds the old ones: the checkpoint or stream is not of the model that it serves."
        )
