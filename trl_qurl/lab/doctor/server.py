"""A server that is killed while it answers: training waits for the next one, and sends the weights
again.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import threading
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from trl_qurl.lab.doctor.report import Line
from trl_qurl.lab.doctor.trial import build_policy, build_trainer, train

HANG_SECONDS = 2.0  # from the stop of a server to its end, so a request is on its way


def check(form: str, name: str) -> list[Line]:
    """Train with a server that dies once. For `"nccl"`, weights are streamed to it, on the last
    GPU.
    """
    from vllm.utils.network_utils import get_open_port

    from trl_qurl.lab.demo.task import build_tokenizer
    from trl_qurl.lab.device import full_precision

    model, port, route = (
        tempfile.mkdtemp(),
        str(get_open_port()),
        "stream" if name == "nccl" else "checkpoint",
    )
    os.environ |= {"VLLM_API_KEY": secrets.token_hex(), "TRL_QURL_CACHE": tempfile.mkdtemp()}
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(model)
    build_policy(tokenizer).save_pretrained(model)
    command = [
        sys.executable,
        "-m",
        "trl_qurl",
        "serve",
        model,
        "--scheme",
        form,
        "--port",
        port,
        "--enforce-eager",
    ]
    command += [
        "--max-model-len",
        "64",
        "--kv-cache-memory-bytes",
        "64M",
        "--gpu-memory-utilization",
        "0.3",
    ]
    command += ["--dtype", full_precision()[1]]
    gpus = os.environ.get(
        "CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))
    )
    server = MortalServer(command, os.environ | {"CUDA_VISIBLE_DEVICES": gpus.split(",")[-1]})
    url = f"http://127.0.0.1:{port}"
    trainer = build_trainer(form, vllm_mode="server", vllm_server_base_url=url, weight_sync=route)
    trainer.add_callback(server)
    if (recoveries := sum(row["sync/recoveries"] for row in train(trainer))) != 1:
        raise RuntimeError(
            f"The server was killed once, but the run recovered {recoveries:.0f} times."
        )
    return [
        Line(
            name,
            f"killed during a request; the run sent the next one its weights by {route}, digests "
            "match",
        )
    ]


class MortalServer(TrainerCallback):
    """A server that is killed after the first step, during the next request, and starts again."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        threading.Thread(
            target=self._keep_running, args=[command, environment], daemon=True
        ).start()

    def _keep_running(self, command: list[str], environment: dict[str, str]) -> None:
        status: int | None = -signal.SIGKILL
        while status == -signal.SIGKILL:  # one that ends by itself would end again
            self.process = psutil.Popen(command, env=environment)
            status = self.process.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the server's processes, so the next request waits, and kill them later."""
        if state.global_step == 1:
            processes = [self.process, *self.process.children(recursive=True)]
            for process in processes:
                process.suspend()
            threading.Timer(HANG_SECONDS, lambda: [process.kill() for process in processes]).start()
