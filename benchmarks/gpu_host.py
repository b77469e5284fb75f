"""Is a rollout faster because of its format, or is the host the limit?

    python benchmarks/gpu_host.py --shape 7B

Engines in 16 bits, INT8 and FP8, without a trainer, are asked for the same rollouts in turns, with
and without the text of the answers. Then each takes some decoding steps by the clock, and as many
under torch's profiler: where the GPU's kernels take less time than a step, the GPU waits for the
host.

Each engine lives in a separate process. They start one after another, because engines that start at
the same time misjudge the free memory of a GPU they share. Weights and tokens are random.
"""

import argparse
import itertools
import json
import os
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, write_record
from shapes import Shape, add_shape_options, read_shape
from turns import Contestant

from trl_qurl.lab.processes import ENGINE_ENVIRONMENT

BASELINE = "bf16"
WAYS = (BASELINE, "int8", "fp8")
PROMPT = 32
WARM_UP = 10  # steps before those that are timed: the first ones read the prompts
CACHE = 6 * 10**9  # bytes of keys and values: 256 answers of 256 tokens at 7B take 4.2 GB
SHARE = 0.2  # of the GPU, which must be free when an engine starts; its cache has its own size


@dataclass(frozen=True)
class Protocol:
    """What each engine is asked for.

    Attributes:
        answers: Numbers of answers at a time.
        tokens: Of each answer.
        repeats: Rollouts of each kind.
        steps: Decoding steps by the clock, and as many under the profiler.
        seconds: No repetition begins after so many.
    """

    answers: tuple[int, ...] = (64, 256)
    tokens: int = 256
    repeats: int = 3
    steps: int = 20
    seconds: float = 150.0

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return max(self.tokens, WARM_UP + 2 * self.steps + 2)


class ProfiledSteps:
    """Times an engine's steps: some by the clock alone, then as many under torch's profiler.

    Args:
        core: The engine's core, whose steps are counted.
        steps: Number of steps in each half.
    """

    def __init__(self, core: Any, steps: int) -> None:
        is_cuda = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(
            activities=[activity.CUDA if is_cuda else activity.CPU]
        )
        self._core = core
        self._get_output = core.get_output
        self._steps = steps
        self._taken = 0
        self._started = 0.0
        self._wall = 0.0

    def __enter__(self) -> "ProfiledSteps":
        self._core.get_output = self._step
        return self

    def __exit__(self, *exception: object) -> None:
        self._core.get_output = self._get_output

    def _step(self) -> Any:
        if self._taken == WARM_UP:
            self._started = time.perf_counter()
        if self._taken == WARM_UP + self._steps:
            self._wall = time.perf_counter() - self._started
            self._synchronize()  # a step that was scheduled ahead is not one of those that follow
            self._profiler.start()
        if self._taken == WARM_UP + 2 * self._steps:
            self._synchronize()
            self._profiler.stop()
        self._taken += 1
        return self._get_output()

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def milliseconds(self) -> dict[str, float]:
        """Return the time of a step by the clock, and of its kernels (of operators on a CPU)."""
        kernels = 0.0
        for event in self._profiler.key_averages():
            if event.device_type.name == "CUDA" and not event.is_user_annotation:
                kernels += event.self_device_time_total
            elif not torch.cuda.is_available():
                kernels += event.self_cpu_time_total
        return {"wall_ms": 1e3 * self._wall / self._steps, "kernel_ms": kernels / 1e3 / self._steps}


class Rollouts:
    """An engine that is started, asked for rollouts, and profiled.

    Args:
        way: The format; `bf16` stands for 16 bits.
        shape: The model.
        protocol: What it will be asked for.
        engine: Arguments for vLLM.
    """

    def __init__(self, way: str, shape: Shape, protocol: Protocol, engine: dict[str, Any]) -> None:
        os.environ.update(ENGINE_ENVIRONMENT | os.environ)
        from trl_qurl.lab.bench import trial  # seconds, which all processes spend at once
        from trl_qurl.lab.bench.plan import Job, Load

        self._trial = trial
        self._folder = tempfile.TemporaryDirectory()
        model = Path(self._folder.name, "model")
        shape.build(torch.bfloat16, torch.device("meta")).config.save_pretrained(model)
        make_tokenizer(shape.vocabulary).save_pretrained(model)
        settings = {"tokenizer": str(model), "skip_tokenizer_init": False, **engine}
        largest = max(protocol.answers)
        load = Load(PROMPT, protocol.longest, largest, train_batch=1)
        formats = None if way == BASELINE else way
        self._job = Job(
            str(model), load, False, ["lm_head"], formats, {"vllm_engine_kwargs": settings}
        )
        self._protocol = protocol

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Call a method by its name."""
        return getattr(self, method)(*arguments)

    def start(self) -> dict[str, Any]:
        """Start the engine, warm up, and return its seconds and settings."""
        started = time.perf_counter()
        self._llm, self._files = self._trial.start_engine(self._job)
        self._clock = self._trial.EngineClock(self._llm)
        for answers, text in itertools.product(self._protocol.answers, (False, True)):
            self._generate(answers, 4, text)
        config = self._llm.llm_engine.vllm_config
        return {
            "start_s": time.perf_counter() - started,
            "graphs": config.compilation_config.cudagraph_mode.name,
            "schedules_ahead": bool(config.scheduler_config.async_scheduling),
        }

    def _generate(self, answers: int, tokens: int, text: bool) -> None:
        from vllm import SamplingParams

        from trl_qurl.rollout.samples import sampling_arguments

        prompts = [{"prompt_token_ids": [number % 200] * PROMPT} for number in range(answers)]
        asked = sampling_arguments({"ignore_eos": True, "detokenize": text})
        params = SamplingParams(max_tokens=tokens, logprobs=0, **asked)
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        lengths = {len(completion.token_ids) for completion in completions}
        has_text = any(completion.text for completion in completions)
        if lengths != {tokens} or has_text != text:
            raise ValueError(f"Answers of {lengths} tokens, with text: {has_text}.")

    def rollout(self, answers: int, text: bool) -> dict[str, float]:
        """Return the seconds of a rollout, and those outside of the engine's steps."""
        self._llm.reset_prefix_cache()
        self._clock.take()
        started = time.perf_counter()
        self._generate(answers, self._protocol.tokens, text)
        rollout = time.perf_counter() - started
        return {"rollout_s": rollout, "host_s": rollout - self._clock.take()}

    def profile(self, answers: int) -> dict[str, float]:
        """Return the milliseconds of a decoding step and of its kernels, without text."""
        steps = self._protocol.steps
        with ProfiledSteps(self._llm.llm_engine.engine_core, steps) as profiled:
            self._generate(answers, WARM_UP + 2 * steps + 2, False)
        return profiled.milliseconds()


def make_tokenizer(vocabulary: int) -> Any:
    """Build a byte-level BPE of about so many tokens: words of up to four letters.

    The weights are random, so their tokens are, too: what matters is that they become text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for length in range(2, 5):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            if len(tokens) == vocabulary:
                break
            word = "".join(letters)
            tokens.append(word)
            merges.append((word[:-1], word[-1]))
    numbers = {token: number for number, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=numbers, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=tokens[0], eos_token=tokens[1])


class Measurement:
    """Asks the engines in turns, and writes the record after each repetition.

    Args:
        engines: By format.
        record: Where `cells` and `engines` are added.
        output: File of the record.
    """

    def __init__(
        self, engines: dict[str, Contestant], record: dict[str, Any], output: Path | None
    ) -> None:
        self._engines = engines
        self._record = record
        self._output = output
        self._cells: dict[tuple[Any, ...], dict[str, Any]] = {}
        record |= {"engines": {}, "cells": []}

    def _ask(self, way: str, *question: Any) -> dict[str, Any]:
        """Return an answer; an engine that fails is recorded and not asked again."""
        if way not in self._engines:
            return {}
        try:
            return self._engines[way].ask(*question)
        except RuntimeError as error:
            self._engines.pop(way).stop()
            self._record["cells"].append({"way": way, "failure": str(error)})
            print(f"{way} failed: {error}", flush=True)
            return {}

    def write(self) -> Path:
        """Write the record."""
        return write_record(self._record, self._output)

    def start(self) -> None:
        """Start the engines one after another."""
        for way in [*self._engines]:
            self._record["engines"][way] = self._ask(way, "start")
            print(f"{way}: {self._record['engines'][way]}", flush=True)
        self.write()

    def rollouts(self, answers: int, text: bool) -> None:
        """Ask each engine for a rollout."""
        for way in [*self._engines]:
            answer = self._ask(way, "rollout", answers, text)
            if not answer:
                continue
            key = (answers, text, way)
            if key not in self._cells:
                self._cells[key] = {"way": way, "answers": answers, "text": text, "rollouts": []}
                self._record["cells"].append(self._cells[key])
            cell = self._cells[key]
            cell["rollouts"].append(answer)
            for name in answer:
                cell[name] = statistics.median(rollout[name] for rollout in cell["rollouts"])
            seconds = [rollout["rollout_s"] for rollout in cell["rollouts"]]
            cell |= {"fastest_s": min(seconds), "slowest_s": max(seconds)}

    def profiles(self, answers: int) -> None:
        """Profile the decoding steps of each engine."""
        for way in [*self._engines]:
            if answer := self._ask(way, "profile", answers):
                cell = {"way": way, "answers": answers, **answer}
                self._record["cells"].append(cell)
                print(cell, flush=True)
        self.write()


def measure(measurement: Measurement, protocol: Protocol) -> None:
    """Start, generate in turns, and profile."""
    started = time.monotonic()
    measurement.start()
    for repeat in range(protocol.repeats):
        if repeat and time.monotonic() - started > protocol.seconds:
            print(f"{repeat} of {protocol.repeats} repetitions fit into the time.")
            break
        for answers, text in itertools.product(protocol.answers, (False, True)):
            measurement.rollouts(answers, text)
        measurement.write()
    # Last, because a profiler may leave the GPU's library slower than before.
    for answers in protocol.answers:
        measurement.profiles(answers)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and return exit status 1 if an engine failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape_options(parser)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--answers", type=int, nargs="+", default=[*Protocol.answers])
    for name in ("tokens", "repeats", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Protocol, name))
    parser.add_argument("--seconds", type=float, default=Protocol.seconds)
    parser.add_argument("--engine-kwargs", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    shape = read_shape(arguments)
    names = ("tokens", "repeats", "steps", "seconds")
    numbers = {name: getattr(arguments, name) for name in names}
    protocol = Protocol(tuple(arguments.answers), **numbers)
    is_cuda = torch.cuda.is_available()
    record = {
        "benchmark": "gpu_host",
        **provenance(torch.device("cuda" if is_cuda else "cpu"), measured="trl_qurl"),
        "shape": asdict(shape),
        "protocol": asdict(protocol),
    }
    # Compiling takes a minute.
    engine: dict[str, Any] = {"dtype": "bfloat16", "compilation_config": {"mode": 0}}
    if is_cuda:
        engine |= {"kv_cache_memory_bytes": CACHE, "gpu_memory_utilization": SHARE}
    engine |= arguments.engine_kwargs
    engines = {way: Contestant(Rollouts, way, shape, protocol, engine) for way in arguments.ways}
    measurement = Measurement(engines, record, arguments.output)
    try:
        measure(measurement, protocol)
    finally:
        for contestant in engines.values():
            contestant.stop()
    print(f"Written to {measurement.write()}")
    return int(any("failure" in cell for cell in record["cells"]))


if __name__ == "__main__":
    sys.exit(main())
