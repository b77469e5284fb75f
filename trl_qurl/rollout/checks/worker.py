"""Reports of a worker, with which a trainer compares the weights that it has sent."""

import time
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from trl_qurl.quantization.checks.served import fingerprint, stored_formats
from trl_qurl.quantization.storage import read_tensors, tensor_shapes
from trl_qurl.rollout.checks.tensors import base_digests, compare_digests, tensor_digest
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.wire import NOT_RECEIVED


class WorkerChecks:
    """Methods of `RolloutWorker` that check."""

    model_runner: Any
    vllm_config: VllmConfig
    rollout_digests: dict[str, str]  # of the latest load; empty if none were requested
    rollout_digest_s: float  # seconds that these took

    def compare_rollout_digests(self, sent: dict[str, str]) -> float:
        """Raise `SyncError` if the latest load received anything but the weights that were sent.

        Returns the seconds that its digests took.
        """
        compare_digests(sent, self.rollout_digests)
        return self.rollout_digest_s

    def check_rollout_adapter(self, path: str) -> None:
        """Compare the adapter that vLLM has loaded with its files, and record their digests.

        Raises:
            SyncError: It is another one.
            RuntimeError: There is none.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        dtype = self.vllm_config.lora_config.lora_dtype
        tensors = dict(read_tensors(Path(path)))
        started = time.perf_counter()
        digests = sorted(tensor_digest(tensor.to(dtype)) for tensor in tensors.values())
        loaded = [_loaded_digests(adapter) for adapter in manager.list_adapters().values()]
        if not loaded:  # the trainer sends it again
            raise RuntimeError("No adapter is loaded: the server was restarted in between.")
        if digests not in loaded:
            reason = f"it uses a different adapter than the one in {path}"
            raise SyncError(f"{NOT_RECEIVED}: {reason}. Resume from the last checkpoint.")
        self.rollout_digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        self.rollout_digest_s = time.perf_counter() - started

    def digest_rollout_base(self) -> dict[str, str]:
        """Return digests of the checkpoint that the engine started from, in the engine's dtype."""
        return base_digests(
            read_tensors(self._starting_checkpoint()), self.vllm_config.model_config.dtype
        )

    def starting_fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of that checkpoint (`plan.fingerprint`)."""
        quantization = self.vllm_config.quant_config
        if isinstance(quantization, CompressedTensorsConfig):
            shapes = tensor_shapes(self._starting_checkpoint())
            return fingerprint(stored_formats(quantization.config, shapes), shapes)
        return {} if quantization is None else {"all layers": f"vLLM's {quantization.get_name()}"}

    def _starting_checkpoint(self) -> Path:
        path = self.vllm_config.model_config.model
        if not Path(path).is_dir():
            path = snapshot_download(path, local_files_only=True, allow_patterns="*.safetensors")
        return Path(path)


def _loaded_digests(adapter: Any) -> list[str]:
    """Return digests of a loaded adapter's matrices. vLLM packs those of fused layers together."""
    parts = [part for layer in adapter.loras.values() for part in (layer.lora_a, layer.lora_b)]
    matrices = [matrix for part in parts for matrix in (part if isinstance(part, list) else [part])]
    return sorted(tensor_digest(matrix) for matrix in matrices if matrix is not None)
