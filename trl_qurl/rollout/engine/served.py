"""vLLM behind its HTTP server: TRL's client, with our requests to the workers.

Weights are sent as tensors over TRL's NCCL group, or as a checkpoint in a directory that the server
sees. Either way, one request to the server's workers loads them, so no update is half applied
between requests.
"""

import gc
import json
import logging
import shlex
import socket
import time
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import requests
import torch
from trl.generation.vllm_client import VLLMClient

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.quantization.formats import UNQUANTIZED
from trl_qurl.quantization.plan import QuantizationPlan
from trl_qurl.rollout import wire
from trl_qurl.rollout.background import in_background
from trl_qurl.rollout.checks.server import check_server
from trl_qurl.rollout.checks.tensors import differences
from trl_qurl.rollout.engine.broadcast import Broadcast
from trl_qurl.rollout.engine.guard import API_KEY_VARIABLE
from trl_qurl.rollout.engine.http import open_session
from trl_qurl.rollout.errors import ServerError, ServerLostError, SyncError

logger = logging.getLogger(__name__)

BROADCAST_GRACE = 10.0  # seconds for a broadcast to end after its request and its group
HEALTH_SECONDS = 5.0  # for a server to say that it is up
PORT_GRACE = 30.0  # seconds for the port of a stream that was lost to become free
TEXT_ANSWERS = ("/reset_encoder_cache", "/v1/load_lora_adapter")  # paths without JSON
ADVICE = "check the server's log, restart it, and resume from the last checkpoint."


class ServedEngine(VLLMClient, wire.Engine):
    """[`VLLMClient`] that loads quantized weights, and limits the time of its requests.

    A failed request raises `ServerError`, and so does every later one until `reconnect`.
    """

    def __init__(
        self,
        *args: Any,
        plan: QuantizationPlan | None = None,  # of this run; by default, nothing is quantized
        shapes: Mapping[str, list[int]] | None = None,  # of the tensors in the run's checkpoint
        request_timeout: float = 900.0,  # seconds
        **kwargs: Any,
    ) -> None:
        self.plan = plan or QuantizationPlan()
        self.shapes = shapes or {}
        self.request_timeout = request_timeout
        self._failure: ServerError | None = None
        self._info: dict[str, Any] = {}  # of the server, once somebody has asked
        self.stream_obstacle: str | None = None  # why tensors cannot be sent over NCCL
        self._stream_device: torch.device | None = None
        self._broadcast: Broadcast | None = None  # the latest
        super().__init__(*args, **kwargs)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait for the server as the parent does, with a limit per request, and say so."""
        self.session = open_session(self.request_timeout)  # the parent's requests begin after this
        deadline = time.monotonic() + total_timeout
        if total_timeout and not self._is_healthy():
            logger.warning(
                "Waiting up to %.0f seconds for the vLLM server at %s.",
                total_timeout,
                self.base_url,
            )
        while not self._is_healthy():
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"No vLLM server answers at {self.base_url} after {total_timeout:.0f} seconds. "
                    f"Start one with {self.command()}, or correct vllm_server_base_url."
                )
            time.sleep(min(retry_interval, total_timeout))

    def _is_healthy(self) -> bool:
        try:
            with open_session(HEALTH_SECONDS, connections=0) as session:
                return session.get(f"{self.base_url}/health").status_code == 200
        except requests.RequestException:
            return False

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Reject a server that cannot load our weights. `open_stream` opens NCCL, if it is used."""
        check_server(self)
        self._info = {}
        if self.get_server_info()["weight_transfer_config"] is None:
            self.stream_obstacle = "the server was started without --weight-transfer-config"
        gpus = [worker["gpu"] for worker in self.call_workers("describe_rollouts")]
        if wire.gpu_uuid() in filter(None, gpus):
            self.stream_obstacle = "the server runs on the trainer's GPU, and NCCL needs two"

    def get_server_info(self) -> dict[str, Any]:
        """Return the server's configuration to TRL, from our workers: vLLM's path takes seconds."""
        if not self._info:
            self._info = self.call_workers("describe_config")[0]
        return self._info

    def open_stream(self, device: torch.device, patience: float = 0.0) -> None:
        """Open the NCCL group that tensors are sent over, once its port is free.

        Raises `ServerLostError` if that fails, or takes more than `patience` seconds.
        """
        # the address that the parent gives to the workers
        from vllm.utils.network_utils import get_ip

        self._stream_device = torch.device(device)
        address = get_ip()
        try:
            # Before the workers are asked: they would join the group of another run that listens
            # there.
            self._wait_for_port(address, patience)
            # nothing ends its wait for dead workers
            opening = in_background(super().init_communicator, device)
            while not wait([opening], 0.1).done:
                if self._failure is not None:
                    raise self._failure
            opening.result()
        except (OSError, RuntimeError) as error:
            raise ServerLostError(
                f"NCCL did not open between this process and the server at {self.base_url} (it "
                f"needs different GPUs, and port {self.group_port} of {address}: vllm_group_port; "
                f"or set weight_sync='checkpoint'). {error}"
            ) from None

    def _wait_for_port(self, address: str, patience: float) -> None:
        """Return once the group's port is free; raise its `OSError` after so many seconds."""
        deadline = time.monotonic() + patience
        while True:
            try:
                socket.create_server((address, self.group_port)).close()
                return
            except OSError:
                if time.monotonic() >= deadline:
                    raise
                gc.collect()  # a group that was lost closes its port with its last reference
                time.sleep(0.1)

    def close_communicator(self) -> None:
        """Abort what runs on the NCCL group, as a broadcast to dead workers, and close its port."""
        if self.communicator is not None:
            self.communicator.destroy()
        super().close_communicator()

    def reconnect(self, total_timeout: float) -> None:
        """Wait for the server after a fault, until it serves the same format and runs nothing old.

        `total_timeout` is in seconds. Raises `ServerLostError` if the server does not come back.
        """
        failure = self._failure
        self.close_communicator()
        if self._broadcast is not None and not self._broadcast.wait(BROADCAST_GRACE):
            raise ServerLostError(
                f"A broadcast to the server's workers did not end: resume the run. {failure}"
            )
        deadline = time.monotonic() + total_timeout
        try:
            self.check_server(total_timeout)
            self._failure = None
            self.init_communicator()
            while not self._post("/reset_prefix_cache")["success"] and time.monotonic() < deadline:
                time.sleep(1.0)
            if self._stream_device is not None:
                self.open_stream(self._stream_device, PORT_GRACE)
        except (ConnectionError, ValueError) as error:
            raise ServerLostError(f"{error} Before that: {failure}") from None

    def command(self, adapter_rank: int = 0) -> str:
        """Return the command that starts a server for this run; a rank of 0 is for no adapters."""
        extra_args = f" --enable-lora --max-lora-rank {adapter_rank}" if adapter_rank else ""
        formats = self.plan.formats or UNQUANTIZED
        option = formats if isinstance(formats, str) else shlex.quote(json.dumps(formats))
        return f"`trl-qurl serve MODEL --scheme {option}{extra_args}`"

    def load_stream(self, named_tensors: NamedTensors, update: wire.WeightUpdate) -> None:  # noqa: D102
        # The workers wait inside NCCL while they serve the request. It has a time limit, but the
        # broadcast does not.
        request = in_background(self.call_workers, "load_rollout_weights", update=update._asdict())
        self._broadcast = Broadcast(self.communicator)
        self._broadcast.send(named_tensors, request)
        request.result()
        self.clear_caches()

    def load_adapter(self, path: Path, update: wire.WeightUpdate) -> None:  # noqa: D102
        body = {"lora_name": wire.ADAPTER, "lora_path": str(path), "load_inplace": True}
        try:
            self._post("/v1/load_lora_adapter", json=body)
        except ServerError as error:
            is_refused = error.status is not None and 400 <= error.status < 500
            raise (SyncError if is_refused else ServerError)(
                f"The vLLM server could not load the adapter written to {path}. Make sure that it "
                "sees that directory (rollout_checkpoint_dir) and was started by `trl-qurl serve`. "
                f"{error}"
            ) from None
        self.call_workers("accept_rollout_adapter", update=update._asdict(), path=str(path))
        self.clear_caches()
        self.model = wire.ADAPTER  # for the parent's requests

    def check_base(self, sent: dict[str, str]) -> None:  # noqa: D102
        clause = differences(sent, self.call_workers("digest_rollout_base")[0])
        if clause:
            raise SyncError(
                f"The vLLM server at {self.base_url} has a different base than this run's adapter: "
                f"{clause}. Start it from the model that is being trained, as it was when the run "
                "began."
            )

    def clear_caches(self) -> None:  # noqa: D102
        if not self._post("/reset_prefix_cache")["success"]:
            raise SyncError(
                "vLLM did not clear the prefix cache of the old weights. Another client's requests "
                "may be running: use one server per run."
            )
        self._post("/reset_encoder_cache")  # image features from the old weights

    def call_workers(self, method: str, **kwargs: Any) -> list[Any]:  # noqa: D102
        try:
            return self._post("/collective_rpc", json={"method": method, "kwargs": kwargs})[
                "results"
            ]
        except ServerError as error:
            if wire.NOT_RECEIVED in str(error):
                raise SyncError(str(error)) from None
            raise

    def _request(self, verb: str, url: str, **kwargs: Any) -> dict[str, Any]:
        # hundreds of requests may be queued behind the one that failed
        if self._failure is not None:
            raise self._failure
        try:
            return self._answer(verb, url.removeprefix(self.base_url), **kwargs)
        except ServerError as error:
            self._failure = error
            raise

    # the parent's requests also go through these two
    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._request("GET", url, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._request("POST", url, **kwargs)

    def _answer(self, verb: str, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return the answer to a request; `ServerError` unless it is vLLM's, and complete."""
        try:
            response = self.session.request(verb, f"{self.base_url}{path}", **kwargs)
            if response.status_code == 200:
                return {} if path in TEXT_ANSWERS else response.json()
        except requests.RequestException as error:
            raise self._no_answer(path, error) from None
        if response.status_code == 401:
            raise ServerLostError(
                f"{self._server} requires an API key: set {API_KEY_VARIABLE} for the trainer to "
                "the value that the server was started with."
            )
        # uvicorn closes a connection after a fault, and the next request would find it dead
        self.session.close()
        raise ServerError(
            f"{self._server} answered {path} with HTTP {response.status_code}: {ADVICE} It says: "
            f"{' '.join(response.text.split())[:500]}",
            response.status_code,
        )

    @property
    def _server(self) -> str:
        return f"The vLLM server at {self.base_url}"

    def _no_answer(self, path: str, error: requests.RequestException) -> ServerError:
        """Return the error of a request that got no complete answer."""
        if isinstance(error, requests.Timeout):
            return ServerError(
                f"{self._server} did not answer {path} within {self.request_timeout:.0f} seconds: "
                f"it hangs, or needs a larger vllm_request_timeout. Otherwise {ADVICE}"
            )
        return ServerError(f"{self._server} did not answer {path} ({error!r:.500}): {ADVICE}")
