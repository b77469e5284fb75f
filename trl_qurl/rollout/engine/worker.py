"""The vLLM worker extension that loads new weights into the layers.

vLLM imports this class by name (`--worker-extension-cls`, its official way to add worker methods).
Neither the class nor its imports need TRL, so the engine may run in an environment without it.
Whatever way tensors come, vLLM's own reload reads them one by one, and `repairs` mends it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from pydantic import TypeAdapter
from vllm.config import VllmConfig
from vllm.utils.torch_utils import set_random_seed

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.quantization.storage import read_tensors
from trl_qurl.rollout.checks.tensors import MeteredStream
from trl_qurl.rollout.checks.worker import WorkerChecks
from trl_qurl.rollout.engine.broadcast import received
from trl_qurl.rollout.errors import SyncError
from trl_qurl.rollout.repairs.in_worker import repaired_reload
from trl_qurl.rollout.repairs.incomplete_reload import watched_reload
from trl_qurl.rollout.wire import FRESH, NOT_RECEIVED, TensorMetadata, WeightUpdate, gpu_uuid


class RolloutWorker(WorkerChecks):
    """Methods that vLLM mixes into its worker class, which has most of these attributes."""

    reload_weights: Callable[..., None]
    get_model: Callable[[], torch.nn.Module]
    weight_transfer_engine: Any
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
            raise RuntimeError("An earlier load failed halfway: restart the server, or the run.")
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

    def accept_rollout_adapter(self, update: Mapping[str, Any], path: str) -> None:
        """Check the adapter that vLLM has loaded, and begin its version."""
        self.check_rollout_adapter(path)
        self._begin_version(WeightUpdate(**update))

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
