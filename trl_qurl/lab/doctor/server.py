"""A server that is killed while it answers: training waits, and sends the next one the weights."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import threading

import psutil
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_qurl.lab.doctor.report import Line
from trl_qurl.lab.doctor.trial import build_policy, build_trainer, train

HANG_SECONDS = 2.0  # from the stop of a server to its end, so a request is on its way


def check(form: str, name: str) -> list[Line]:
    """Train with a server that dies once.

    For the trial `"nccl"`, weights are streamed to it. It runs on the last GPU.
    """
    from vllm.utils.network_utils import get_open_port

    from trl_qurl.lab.demo.task import build_tokenizer
    from trl_qurl.lab.device import full_precision

    os.environ["VLLM_API_KEY"] = secrets.token_hex()
    os.environ["TRL_QURL_CACHE"] = tempfile.mkdtemp()
    model = tempfile.mkdtemp()
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(model)
    build_policy(tokenizer).save_pretrained(model)
    port = get_open_port()
    options = {
        "--scheme": form,
        "--port": port,
        "--max-model-len": 64,
        "--kv-cache-memory-bytes": "64M",
        "--gpu-memory-utilization": 0.3,
        "--dtype": full_precision()[1],
    }
    command = [sys.executable, "-m", "trl_qurl", "serve", model, "--enforce-eager"]
    command += [f"{option}={value}" for option, value in options.items()]
    all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
    last_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")[-1]
    server = MortalServer(command, os.environ | {"CUDA_VISIBLE_DEVICES": last_gpu})
    url = f"http://127.0.0.1:{port}"
    route = "stream" if name == "nccl" else "checkpoint"
    trainer = build_trainer(form, vllm_mode="server", vllm_server_base_url=url, weight_sync=route)
    trainer.add_callback(server)
    recoveries = sum(row["sync/recoveries"] for row in train(trainer))
    if recoveries != 1:
        raise RuntimeError(
            f"The server was killed once, but the run recovered {recoveries:.0f} times."
        )
    text = (
        f"killed during a request; the run sent the next one its weights by {route}, digests match"
    )
    return [Line(name, text)]


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

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Stop the server's processes, so the next request waits, and kill them later."""
        if state.global_step == 1:
            processes = [self.process, *self.process.children(recursive=True)]
            for process in processes:
                process.suspend()
            threading.Timer(HANG_SECONDS, _kill, args=[processes]).start()


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.kill()
