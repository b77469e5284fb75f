"""The trainer's side of a vLLM server: TRL's client, with weights that arrive in one call and say what arrived.

Weights travel as tensors over TRL's NCCL group, or as a checkpoint in a directory that the server sees, which works
between any processes that share a file system, on any device. Either way a single request to the server's workers
loads them, so nothing is left half done between requests.
"""

import logging
import os
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry

from trl_qurl.quantization.schemes import UNQUANTIZED, QuantizationScheme
from trl_qurl.rollout.errors import ServerError, SyncError
from trl_qurl.rollout.stream import TensorMetadata, as_announced
from trl_qurl.rollout.transport import choose_transport

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "trl_qurl.rollout.engine.worker.RolloutWorker"
"""vLLM's `worker_extension_cls`. A name, so that only the engine imports the class."""

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Where vLLM's server, too, looks for the key that its clients must know."""

HEALTH_TIMEOUT = 5.0  # seconds for an answer to `/health`, which needs no work
WAITING_NOTICE = 10.0  # seconds between lines about a server that is not up yet


class RolloutVLLMClient(VLLMClient):
    """
    [`VLLMClient`] that loads quantized weights through trl-qurl's worker extension, and bounds every request in time.

    Args:
        scheme: Format the weights will have; `None` for full precision.
        ignore: Modules kept in full precision.
        weight_sync: `"auto"`, `"stream"` or `"checkpoint"`.
        request_timeout: Seconds a request may take.
        args, kwargs: As for the parent.

    Attributes:
        transport: `"stream"` or `"checkpoint"`, once `init_communicator` has decided.

    Raises:
        ConnectionError: If no server answers within `connection_timeout`; names the command that starts one.
        ServerError: From any request that fails. From then on, all do.
    """

    def __init__(
        self,
        *args: Any,
        scheme: QuantizationScheme | None = None,
        ignore: Collection[str] = (),
        weight_sync: str = "auto",
        request_timeout: float = 1800.0,
        **kwargs: Any,
    ) -> None:
        self.scheme, self.ignore = scheme, ignore
        self.weight_sync = weight_sync
        self.transport = "checkpoint"
        self.request_timeout = request_timeout
        self._failure: ServerError | None = None
        key = os.environ.get(API_KEY_VARIABLE)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        super().__init__(*args, **kwargs)
        # The parent also retries requests whose answer never came, five times: a server that hangs would be waited for
        # six times over, and one that restarted meanwhile would answer from other weights.
        retries = Retry(
            total=3, read=False, status_forcelist=[502, 503], backoff_factor=1, allowed_methods=["POST", "GET"]
        )
        for scheme_name in ("http://", "https://"):
            self.session.mount(scheme_name, HTTPAdapter(max_retries=retries, pool_maxsize=64))

    # Start -----------------------------------------------------------------------------------------------------------

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait for the server to answer, as the parent does; say that one waits, and how to start one in the end."""
        started = noticed = time.monotonic()
        while not self._is_healthy():
            now = time.monotonic()
            if now - started >= total_timeout:
                raise ConnectionError(
                    f"No vLLM server answers at {self.base_url} after {total_timeout:.0f} seconds: start one with "
                    f"{self._start_command}, or correct vllm_server_base_url."
                )
            if now - noticed >= WAITING_NOTICE:
                noticed = now
                logger.warning(
                    "Waiting for the vLLM server at %s (%.0f of %.0f s).", self.base_url, now - started, total_timeout
                )
            time.sleep(min(retry_interval, total_timeout))
        super().check_server(total_timeout, retry_interval)

    @property
    def _start_command(self) -> str:
        return f"`trl-qurl serve MODEL --scheme {self.scheme.name if self.scheme else UNQUANTIZED}`"

    def _is_healthy(self) -> bool:
        try:
            return requests.get(f"{self.base_url}/health", timeout=HEALTH_TIMEOUT).status_code == 200
        except requests.RequestException:
            return False

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """
        Make sure that the server can load our weights, choose how they travel, and open the way.

        Raises:
            ValueError: It lacks the worker extension, serves a model in another format, or cannot be streamed to.
        """
        info = self._check_ready()
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        transport = choose_transport(self.weight_sync, place, info["weight_transfer_config"] is not None)
        logger.info("Weights travel to %s by %s: %s.", self.base_url, transport.name, transport.reason)
        self.transport = transport.name
        if self.transport == "stream":
            super().init_communicator(device)

    def _check_ready(self) -> dict[str, Any]:
        command = self._start_command
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
        served = self.describe()
        wanted: dict[str, Any] = {"format": None, "ignore": []}
        if self.scheme:
            wanted = {"format": self.scheme.checkpoint_format, "ignore": list(self.ignore)}
        # vLLM may have renamed the ignored modules to its own names, so their number is compared.
        if served["format"] != wanted["format"] or len(served["ignore"]) != len(wanted["ignore"]):
            raise ValueError(
                f"The vLLM server at {self.base_url} serves {self.model!r} with {_in_words(served)}, but "
                f"rollout_quantization={self.scheme.name if self.scheme else None!r} sends {_in_words(wanted)}: "
                f"restart it with {command} (and the same --ignore), or change rollout_quantization or "
                "quantization_ignore."
            )
        return info

    # Weights ---------------------------------------------------------------------------------------------------------

    def load_checkpoint(self, path: str, version: str, digest: bool, partial: bool = False) -> list[dict[str, Any]]:
        """
        Make every worker of the server load the checkpoint at `path` in place, and drop what was cached under the old.

        Args:
            path: Directory that the server sees.
            version: Name of these weights, which `weight_version` returns from then on.
            digest: Whether the workers report a digest of every tensor.
            partial: Whether layers that nothing comes for keep what they hold.

        Returns:
            What each worker reports.

        Raises:
            ServerError: If the server could not load it; its answer is part of the message.
            SyncError: If it kept what it had cached.
        """
        try:
            reports = self._call_workers(
                "load_rollout_weights", weights_path=path, version=version, digest=digest, partial=partial
            )
        except ServerError as error:
            raise ServerError(
                f"The vLLM server could not load the weights written to {path}: make sure that it sees that directory "
                f"(rollout_checkpoint_dir) and serves the model that is being trained. {error}"
            ) from None
        self._adopt(version)
        return reports

    def load_stream(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        metadata: TensorMetadata,
        version: str,
        digest: bool,
        partial: bool = False,
    ) -> list[dict[str, Any]]:
        """
        Broadcast tensors to the server's workers, which load them in place; as `load_checkpoint` otherwise.

        Args:
            named_tensors: Tensors on the trainer's CUDA device.
            metadata: What will come, in order; the workers cut the stream by it.
            version: Name of these weights.
            digest: Whether the workers report a digest of every tensor.
            partial: Whether layers that nothing comes for keep what they hold.

        Raises:
            ServerError: If the server could not load them.
            SyncError: If the stream is not what the metadata announced, or the server kept what it had cached.
        """
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        names, dtype_names, shapes = (list(column) for column in zip(*metadata, strict=True))
        announced = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
        # The workers wait inside NCCL while they serve the request, so it must run beside the broadcast.
        executor = ThreadPoolExecutor(max_workers=1)
        try:
            request = executor.submit(
                self._call_workers,
                "load_rollout_weights",
                announced=announced,
                version=version,
                digest=digest,
                partial=partial,
            )
            packed_nccl_broadcast_producer(
                iterator=as_announced(named_tensors, metadata, request.done),
                group=self.communicator,
                src=0,
                post_iter_func=lambda item: item[1],
            )
            reports = request.result()
        except SyncError:
            if request.done() and (cause := request.exception()) is not None:
                raise cause from None
            raise
        finally:
            # Not waited for: if the broadcast failed, the workers never answer.
            executor.shutdown(wait=False)
        self._adopt(version)
        return reports

    def _adopt(self, version: str) -> None:
        if not self._request("POST", "/reset_prefix_cache").get("success", True):
            raise SyncError(
                "vLLM did not empty its prefix cache, which holds keys and values of the old weights: requests of "
                "another client may be running. Give every run a server of its own."
            )
        self._request("POST", "/update_weight_version", json={"new_version": version})

    def weight_version(self) -> str:
        """Name of the weights the server holds; vLLM's own default for those it started with."""
        return self._request("GET", "/weight_info")["weight_version"]

    def describe(self) -> dict[str, Any]:
        """What `RolloutWorker.describe_rollouts` says."""
        return self._call_workers("describe_rollouts")[0]

    # Requests --------------------------------------------------------------------------------------------------------

    def _call_workers(self, method: str, **kwargs: Any) -> list[dict[str, Any]]:
        return self._request("POST", "/collective_rpc", json={"method": method, "kwargs": kwargs})["results"]

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._request("GET", url.removeprefix(self.base_url), **kwargs)

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._request("POST", url.removeprefix(self.base_url), **kwargs)

    def _request(self, verb: str, path: str, **kwargs: Any) -> dict[str, Any]:
        if self._failure is not None:  # hundreds of requests may be queued behind the one that failed
            raise self._failure
        try:
            return self._answer(verb, path, **kwargs)
        except ServerError as error:
            self._failure = error
            raise

    def _answer(self, verb: str, path: str, **kwargs: Any) -> dict[str, Any]:
        way_out = "look at the server's log, start it again, and resume from the last checkpoint."
        try:
            response = self.session.request(
                verb, f"{self.base_url}{path}", timeout=self.request_timeout, headers=self._headers, **kwargs
            )
        except requests.Timeout:
            raise ServerError(
                f"The vLLM server did not answer {path} within {self.request_timeout:.0f} seconds: it hangs, or needs "
                f"a larger vllm_request_timeout. Otherwise {way_out}"
            ) from None
        except requests.RequestException as error:
            raise ServerError(f"The vLLM server at {self.base_url} is gone ({path}: {error}): {way_out}") from None
        if response.status_code == 401:
            raise ServerError(
                f"The vLLM server at {self.base_url} wants an API key: set {API_KEY_VARIABLE} to it for the trainer."
            )
        if response.status_code != 200:
            reason = " ".join(response.text.split())[:500]
            raise ServerError(
                f"The vLLM server at {self.base_url} answered {path} with HTTP {response.status_code}: {way_out} It "
                f"says: {reason}"
            )
        return response.json()


def _in_words(rollout_format: dict[str, Any]) -> str:
    if rollout_format["format"] is None:
        return "unquantized weights"
    return f"{rollout_format['format']} weights except {sorted(rollout_format['ignore'])}"
