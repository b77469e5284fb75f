"""A vLLM server whose weights arrive as checkpoints instead of over NCCL.

TRL's own client streams tensors through a CUDA process group. This one writes nothing itself: it tells the server
which directory to load, which works between processes that share a file system, on any device.
"""

from collections.abc import Collection
from typing import Any

import requests
import torch
from trl.generation.vllm_client import VLLMClient

from trl_qurl.quantization.schemes import QuantizationScheme

WORKER_EXTENSION = "trl_qurl.rollout.worker.RolloutWorker"
"""vLLM's `worker_extension_cls`. A name, so that only the engine imports the class."""

UNQUANTIZED: dict[str, Any] = {"format": None, "ignore": []}


class CheckpointVLLMClient(VLLMClient):
    """
    [`VLLMClient`] without a communicator: weights are reloaded by the server from a path.

    Takes the same arguments. The server must run with `VLLM_SERVER_DEV_MODE=1`.

    Raises:
        ConnectionError: If no server answers within `connection_timeout`; names the command that starts one.
    """

    def __init__(self, *args: Any, connection_timeout: float = 0.0, **kwargs: Any) -> None:
        # A server that hangs is waited for as long as one that starts.
        self.request_timeout = max(connection_timeout, 10.0)
        super().__init__(*args, connection_timeout=connection_timeout, **kwargs)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait for the server to answer, as the parent does; say how to start one if it does not."""
        try:
            super().check_server(total_timeout, retry_interval)
        except OSError:  # what `requests` raises is its own ConnectionError, not Python's
            raise ConnectionError(
                f"No vLLM server answers at {self.base_url} after {total_timeout:.0f} seconds: start one with "
                "`trl-qurl serve MODEL --scheme int8` (or the scheme of rollout_quantization), or correct "
                "vllm_server_base_url."
            ) from None

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: no process group is needed, and TRL's would insist on a CUDA device."""

    def check_ready(self, scheme: QuantizationScheme | None, ignore: Collection[str]) -> None:
        """
        Make sure that the server can load our weights and runs in the format they will have.

        Raises:
            ValueError: If it lacks the worker extension, or serves an unquantized or differently quantized model.
        """
        command = f"`trl-qurl serve MODEL --scheme {scheme.name if scheme else 'none'}`"
        try:
            info = self.get_server_info()
        except RuntimeError:
            raise ValueError(
                f"The vLLM server at {self.base_url} runs without its development endpoints, through which weights "
                f"are loaded: restart it with {command}."
            ) from None
        if info["parallel_config"]["worker_extension_cls"] != WORKER_EXTENSION:
            raise ValueError(
                f"The vLLM server at {self.base_url} runs without trl-qurl's worker extension, which loads the "
                f"weights: restart it with {command}."
            )
        served = self._call_workers("rollout_format", {})["results"][0]
        wanted = {"format": scheme.checkpoint_format, "ignore": list(ignore)} if scheme else UNQUANTIZED
        # vLLM may have renamed the ignored modules to its own names, so their number is compared.
        if served["format"] != wanted["format"] or len(served["ignore"]) != len(wanted["ignore"]):
            raise ValueError(
                f"The vLLM server at {self.base_url} serves {self.model!r} with {_describe(served)}, but "
                f"rollout_quantization={scheme.name if scheme else None!r} sends {_describe(wanted)}: restart it with "
                f"{command} (and the same --ignore), or change rollout_quantization or quantization_ignore."
            )

    def load_checkpoint(self, path: str, version: str, digest: bool) -> list[dict[str, Any]]:
        """
        Make every worker of the server load the checkpoint at `path` in place, and drop what was cached under the old.

        Args:
            path: Directory that the server sees.
            version: Name of these weights, which `weight_version` returns from then on.
            digest: Whether the workers report a digest of every tensor.

        Returns:
            What each worker reports.

        Raises:
            RuntimeError: If the server could not load it; its answer is part of the message.
        """
        request = {"weights_path": path, "version": version, "digest": digest}
        try:
            reports = self._call_workers("load_rollout_weights", request)["results"]
        except RuntimeError as error:
            raise RuntimeError(
                f"The vLLM server could not load the weights written to {path}: make sure that it sees that directory "
                f"(rollout_checkpoint_dir) and serves the model that is being trained. {error}"
            ) from None
        self.reset_prefix_cache()
        self._request("POST", "/update_weight_version", json={"new_version": version})
        return reports

    def weight_version(self) -> str:
        """Name of the weights the server holds; vLLM's own default for those it started with."""
        return self._request("GET", "/weight_info")["weight_version"]

    def _call_workers(self, method: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        return self._request("POST", "/collective_rpc", json={"method": method, "kwargs": kwargs})

    def _request(self, verb: str, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            response = self.session.request(verb, f"{self.base_url}{path}", timeout=self.request_timeout, **kwargs)
        except requests.Timeout:
            raise RuntimeError(
                f"{self.base_url}{path} did not answer within {self.request_timeout:.0f} seconds; if the server is "
                "only slow, raise vllm_server_timeout."
            ) from None
        except requests.RequestException as error:
            raise RuntimeError(f"{self.base_url}{path} could not be reached ({error}).") from None
        if response.status_code != 200:
            reason = response.text.strip()[:500]
            raise RuntimeError(f"{self.base_url}{path} answered with HTTP {response.status_code}: {reason}")
        return response.json()


def _describe(rollout_format: dict[str, Any]) -> str:
    if rollout_format["format"] is None:
        return "unquantized weights"
    return f"{rollout_format['format']} weights except {sorted(rollout_format['ignore'])}"
