"""The vLLM worker extension that loads new weights into the layers.

vLLM imports this class by name (`--worker-extension-cls`, its official way to add worker methods).
Neither the class nor its imports need TRL, so the engine may run in an environment without it.
Whatever way tensors come, vLLM's own reload reads them one by one, and `repairs` mends it.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from huggingface_hub import snapshot_download
from pydantic import TypeAdapter
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.utils.torch_utils import set_random_seed

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.quantization.checks.served import fingerprint, stored_formats
from trl_qurl.quantization.storage import read_tensors, tensor_shapes
from trl_qurl.rollout.checks.tensors import (
    MeteredStream,
    base_digests,
    compare_digests,
    tensor_digest,
)
from trl_qurl.rollout.engine.broadcast import received
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.repairs.in_worker import repaired_reload
from trl_qurl.rollout.repairs.incomplete_reload import watched_reload
from trl_qurl.rollout.wire import FRESH, NOT_RECEIVED, TensorMetadata, WeightUpdate, gpu_uuid


class RolloutWorker:
    """Methods that vLLM mixes into its worker class, which has most of these attributes."""

    reload_weights: Callable[..., None]
    get_model: Callable[[], torch.nn.Module]
    model_runner: Any
    vllm_config: VllmConfig
    weight_transfer_engine: Any
    rollout_digests: dict[str, str]  # of the latest load; empty if none were requested
    rollout_digest_s: float  # seconds that these took
    loaded_version = FRESH
    rollout_load_failed = False

    def load_rollout_weights(
        self,
        update: Mapping[str, Any],  # the fields of a `WeightUpdate`
        weights_iterator: NamedTensors | None = None,  # only in the trainer's process
        weights_path: str | None = None,  # a checkpoint on a file system that this worker sees
    ) -> None:
        """Replace weights in place with checkpoint-format tensors.

        They come over NCCL if `update` has metadata, else from files or an iterator. Raises
        `RuntimeError` if a layer kept its old weights, files are out of sight, or an earlier load
        failed.
        """
        request = WeightUpdate(**update)
        source: NamedTensors = weights_iterator or ()
        if request.metadata is not None:
            source = self._receive(request.metadata)
        elif weights_path is not None:
            source = _read_files(weights_path)
        if self.rollout_load_failed:
            raise RuntimeError("An earlier load of weights failed halfway: restart the engine.")
        self.rollout_load_failed = True
        self.rollout_digests = {}
        stream = MeteredStream(source, self.rollout_digests if request.digest else None)
        model = self.get_model()
        with watched_reload(model):
            with repaired_reload(model):
                self.reload_weights(weights_iterator=stream)
            self.rollout_load_failed = False  # vLLM can reload even if a layer is incomplete
        self.rollout_digest_s = stream.digest_s
        self._begin_version(request)

    def _receive(self, metadata: TensorMetadata) -> NamedTensors:
        communicator = self.weight_transfer_engine.model_update_group
        if communicator is None:
            # it is, before the retry
            raise RuntimeError("The server was restarted: NCCL is not open.")
        return received(metadata, communicator)

    def compare_rollout_digests(self, sent: dict[str, str]) -> float:
        """Raise `SyncError` if the latest load received anything but the weights that were sent.

        Returns the seconds that its digests took.
        """
        compare_digests(sent, self.rollout_digests)
        return self.rollout_digest_s

    def accept_rollout_adapter(self, update: Mapping[str, Any], path: str) -> None:
        """Record version and digests of the adapter that vLLM has loaded.

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
        self._begin_version(WeightUpdate(**update))

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

    def rollout_version(self) -> str:
        """Return the version of the weights loaded last."""
        return self.loaded_version

    def _begin_version(self, update: WeightUpdate) -> None:
        self.loaded_version = update.version
        # vLLM seeds the engines of `--data-parallel-size` alike: groups had duplicates
        if update.noise is not None:
            engine = self.vllm_config.parallel_config.data_parallel_index
            set_random_seed(crc32(f"{update.noise}-engine{engine}".encode()))

    def describe_config(self) -> dict[str, Any]:
        """Return vLLM's configuration as `/server_info` does."""
        return TypeAdapter(VllmConfig).dump_python(self.vllm_config, mode="json", fallback=str)

    def describe_rollouts(self) -> dict[str, object]:
        """Return the fields of an `EngineDescription`."""
        dtypes: set[torch.dtype] = set()
        for layer in self.get_model().modules():
            is_quantized = getattr(layer, "scheme", None) is not None
            for name, parameter in layer.named_parameters(recurse=False):
                # Scales of a cache are float32.
                if name == "weight" and parameter.is_floating_point() and not is_quantized:
                    dtypes.add(parameter.dtype)
        lora = self.vllm_config.lora_config
        # `gpu/model_runner.py`, and not `gpu_model_runner.py`
        is_v2 = type(self.model_runner).__module__.endswith(".model_runner")
        return {
            "max_model_len": self.vllm_config.model_config.max_model_len,
            "kv_cache_dtype": self.vllm_config.cache_config.cache_dtype,
            "max_lora_rank": lora.max_lora_rank if lora else 0,
            "runner": "V2" if is_v2 else "V1",
            "gpu": gpu_uuid(),
            "dtype": str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None,
        }


def _read_files(path: str) -> NamedTensors:
    """Return the tensors of a checkpoint; `SyncError` if this worker does not see its files."""
    if not any(Path(path).glob("*.safetensors")):
        raise SyncError(
            f"{NOT_RECEIVED}: the vLLM server does not see the files in {path}; set "
            "rollout_checkpoint_dir to a directory that both the trainer and the server see."
        )
    return read_tensors(Path(path))


def _loaded_digests(adapter: Any) -> list[str]:
    """Return digests of a loaded adapter's matrices. vLLM packs those of fused layers together."""
    parts = [part for layer in adapter.loras.values() for part in (layer.lora_a, layer.lora_b)]
    matrices = [matrix for part in parts for matrix in (part if isinstance(part, list) else [part])]
    return sorted(tensor_digest(matrix) for matrix in matrices if matrix is not None)
