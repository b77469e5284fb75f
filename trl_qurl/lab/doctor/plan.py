"""What is tried, in which order, and on which GPUs: one process per entry."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

UNQUANTIZED = "none"

FSDP2 = (
    "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
    "--fsdp_reshard_after_forward", "true", "--fsdp_state_dict_type", "FULL_STATE_DICT",
    "--num_machines", "1", "--mixed_precision", "bf16", "--dynamo_backend", "no", "--main_process_port", "0",
)  # fmt: skip
"""Options of `accelerate launch`: FSDP2 as in examples/accelerate_configs/fsdp2.yaml, on a free port."""

STREAMING_VLLM = "0.28"
"""Oldest vLLM that weights are streamed to: `STREAM_VERSION`, whose module would import torch."""

NUMBERS = {1: "a GPU", 2: "two GPUs", 3: "three GPUs"}


class Job(NamedTuple):
    """A process that tries something.

    Attributes:
        call: Module and function here.
        argument: Of the function: a format, and after an `@` the GPU of a server.
        lines: Names of the lines that it reports, in order.
        gpus: GPUs that must be there; 0 where a CPU does as well.
        ranks: Processes of the trainer, each on one GPU.
        patience: Factor of the time limit; a server needs more of it.
        vllm: Oldest version that will do.
    """

    call: str
    argument: str
    lines: tuple[str, ...]
    gpus: int = 0
    ranks: int = 1
    patience: float = 1.0
    vllm: str = "0"

    def obstacle(self, gpus: int, vllm: str) -> str | None:
        """Why it cannot be tried with so many GPUs and this version of vLLM."""
        if gpus < self.gpus:
            return f"needs {NUMBERS[self.gpus]}"
        return f"needs vLLM {self.vllm} or later" if Version(vllm) < Version(self.vllm) else None

    def command(self, result: Path) -> list[str]:
        """The command that runs it."""
        launch = ["-m", "accelerate.commands.launch", "--num_processes", str(self.ranks), *FSDP2]
        start = [sys.executable, *(launch if self.ranks > 1 else [])]
        return [*start, "-m", "trl_qurl.lab.doctor.worker", self.call, self.argument, str(result)]


LOOK = Job("device.describe", "", ("torch", "gpus", "formats", "division"))
"""What torch sees, which the rest depends on."""


def plan(formats: Sequence[str], gpus: Sequence[str]) -> list[Job]:
    """All that is to be tried with engines, in order.

    Args:
        formats: Names of the formats; the first one is used wherever one is enough.
        gpus: GPUs as CUDA_VISIBLE_DEVICES names them.
    """
    first = formats[0]
    own, second, third = [*gpus, "", "", ""][:3]
    every = [
        Job("training.train_format", name, (f"engine-{name}", f"train-{name}", f"probe-{name}")) for name in formats
    ]
    return [
        *every,
        Job("training.train_padded", first, ("padded",)),
        Job("training.train_with_graphs", first, ("graphs",), gpus=1),
        Job("training.train_asleep", first, ("sleep",), gpus=1),
        Job("training.train_with_fp8_cache", first, ("kv-cache",), gpus=1),
        Job("servers.train_with_files", f"{first}@{own}", ("server",), patience=2),
        Job(
            "servers.train_with_stream",
            f"{first}@{second}",
            ("stream", "stream-order", "stream-fault"),
            gpus=2,
            patience=2,
            vllm=STREAMING_VLLM,
        ),
        Job(
            "servers.sync_large_policy",
            f"{UNQUANTIZED}@{second}",
            ("server-memory",),
            gpus=2,
            patience=2,
            vllm=STREAMING_VLLM,
        ),
        Job("sharded.train_colocated", first, ("fsdp2",), gpus=2, ranks=2),
        Job(
            "sharded.train_served",
            f"{first}@{third}",
            ("fsdp2-stream",),
            gpus=3,
            ranks=2,
            patience=2,
            vllm=STREAMING_VLLM,
        ),
    ]
