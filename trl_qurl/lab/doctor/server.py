"""Training with a server: on the last GPU, with weights over NCCL, or on the CPU, by files."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile

import torch

from trl_qurl.lab.doctor.report import Line
from trl_qurl.lab.doctor.trial import STEPS, build_policy, build_trainer, train


def check(form: str, name: str) -> list[Line]:
    """Train; the server ends with this process."""
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
    command = [sys.executable, "-m", "trl_qurl", "serve", model, "--enforce-eager"]
    command += [f"--scheme={form}", f"--port={port}", f"--dtype={full_precision()[1]}"]
    command += ["--max-model-len=64", "--kv-cache-memory-bytes=64M"]
    environment = dict(os.environ)
    route = "checkpoint"
    place = "on this CPU, weights by files"
    if torch.cuda.is_available():
        command.append("--gpu-memory-utilization=0.3")
        all_gpus = ",".join(map(str, range(torch.cuda.device_count())))
        last_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")[-1]
        environment["CUDA_VISIBLE_DEVICES"] = last_gpu
        route = "stream"
        place = f"on GPU {last_gpu}, weights over NCCL"
    subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    kl = train(build_trainer(form, vllm_mode="server", vllm_server_base_url=url, weight_sync=route))
    text = (
        f"trained {STEPS} steps with a server {place}, KL of actor and policy up to {kl:.1e} nats"
    )
    return [Line(name, text, data={"kl": kl})]
