"""The parts of `gpu_hour.py`, the most valuable ones first."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from provenance import ROOT
from trainers import TRL

FOLDER = "{folder}"
"""Stands for the part's directory in its command."""

RECORD = ["--output", f"{FOLDER}/record.json"]
LARGE_GB = 70.0  # for three engines of 7B, or a trainer of it beside an engine


@dataclass(frozen=True)
class Part:
    """A part of the plan.

    Attributes:
        name: Also the name of its directory. The word before the first hyphen says how to read its
            results, the next one is the size of the model.
        command: What Python runs.
        seconds: Estimated duration.
        memory_gb: Size of the GPU that it needs.
    """

    name: str
    command: Sequence[str]
    seconds: float
    memory_gb: float = 0.0


class Plan:
    """Builds the parts; a rehearsal takes tiny models, in float32 where there is a choice."""

    def __init__(self, rehearse: bool) -> None:
        self._rehearse = rehearse

    def parts(self) -> list[Part]:
        """Return the parts in the order in which they run."""
        pack = [f"{ROOT}/benchmarks/gpu_pack.py", *RECORD]
        reload = [f"{ROOT}/benchmarks/gpu_reload.py", *RECORD]
        tests = ["-m", "pytest", "-q", "-m", "gpu", f"--junitxml={FOLDER}/tests.xml"]
        return [
            Part("pack", pack, 40),
            Part("reload", reload, 150),
            self._host(),
            *self._steps(),
            self._bench(),
            self._sync(),
            self._demo(),
            Part("tests", [*tests, f"{ROOT}/tests"], 360),
        ]

    def _script(self, name: str, size: str, *arguments: str) -> list[str]:
        shape = "tiny" if self._rehearse else size
        return [f"{ROOT}/benchmarks/{name}.py", "--shape", shape, *arguments]

    def _host(self) -> Part:
        """Rollouts of an engine alone, in turns, and the time of its kernels."""
        load = ["--seconds", "110"]
        if self._rehearse:
            engine = {"dtype": "float32", "enforce_eager": True}
            load = ["--answers", "4", "8", "--tokens", "8", "--repeats", "2", "--steps", "4"]
            load += ["--engine-kwargs", json.dumps(engine)]
        command = self._script("gpu_host", "7B", *load, *RECORD)
        return Part("host-7B", command, 150, self._memory_gb("7B"))

    def _steps(self) -> list[Part]:
        """Steps of plain TRL and of ours, at two sizes and two lengths."""
        parts = []
        # vLLM's CPU build cannot load the weights that TRL sends.
        plain = [TRL] if torch.cuda.is_available() or not self._rehearse else []
        for size, tokens, seconds in (("0.5B", 512, 50), ("7B", 512, 100)):
            # At 0.5B the host is the limit, and 16 bits gain the most.
            ours = "bf16" if size == "0.5B" else "int8"
            parts += [self._step(size, tokens, way, seconds) for way in (*plain, ours)]
        for size, seconds in (("7B", 180), ("0.5B", 120)):
            ours = "bf16" if size == "0.5B" else "int8"
            parts += [self._step(size, 2048, way, seconds) for way in (*plain, ours)]
        parts.append(self._step("0.5B", 512, "int8", 50))
        parts += [self._step("7B", 512, way, 100) for way in ("bf16", "fp8")]
        return parts

    def _step(self, size: str, tokens: int, way: str, seconds: float) -> Part:
        repeats = 3 if tokens <= 512 else 1
        answers = 64
        load = ["--ways", way]
        if self._rehearse:
            repeats, answers = 1, 16
            load += ["--engine-dtype", "float32"]
        length = tokens // 64 if self._rehearse else tokens
        load += ["--completions", str(answers), "--tokens", str(length), "--repeats", str(repeats)]
        if size == "7B":  # the optimizer of the whole model would take 120 GB
            load += ["--lora-rank", "16"]
            if not self._rehearse:
                load += ["--dtype", "bfloat16"]
        name = f"steps-{size}-{tokens}-{way.replace(' ', '-')}"
        command = self._script("training_step", size, *load, *RECORD)
        return Part(name, command, seconds, self._memory_gb(size))

    def _bench(self) -> Part:
        """`trl-qurl bench`: steps in turns."""
        load = ["--scheme", "int8,fp8", "--batch", "256", "--prompt-len", "32", "--minutes", "1"]
        engine: dict[str, Any] = {"compilation_config": {"mode": 0}}  # compiling takes a minute
        if self._rehearse:
            load = ["--scheme", "int8,fp8", "--batch", "8", "--train-batch", "4"]
            load += ["--completion-len", "8", "--minutes", "0.1"]
            engine = {"dtype": "float32", "enforce_eager": True}
        load += ["--engine-kwargs", json.dumps(engine), "--output", f"{FOLDER}/bench.json"]
        return Part("bench-0.5B", self._script("shapes", "0.5B", *load), 150)

    def _sync(self) -> Part:
        load = ["--ways", "bf16-stream", "int8-stream", "fp8-stream", "int8-checkpoint"]
        load += ["--repeats", "1" if self._rehearse else "3"]
        if self._rehearse:
            load += ["--engine-dtype", "float32"]
        return Part("sync-0.5B", self._script("weight_sync", "0.5B", *load, *RECORD), 150)

    def _demo(self) -> Part:
        """A training run that learns."""
        command = ["-m", "trl_qurl", "demo", "--output-dir", FOLDER]
        if self._rehearse:
            command += ["--rollouts", "10", "--required-share", "-1"]  # too few to learn anything
        return Part("demo", command, 150)

    def _memory_gb(self, size: str) -> float:
        return LARGE_GB if size == "7B" and not self._rehearse else 0.0
