"""One process of a bench: it starts an engine with random weights and measures it.

    python -m trl_qurl.lab.bench.worker JOB RESULT

A process of its own, because an engine's memory is freed only when its process ends. No weights are loaded: the
cost of a step does not depend on their values.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.bench.costs import EngineCosts, Measurement, Timing
from trl_qurl.lab.bench.workload import Job
from trl_qurl.lab.device import full_precision

if TYPE_CHECKING:
    from vllm import LLM

REPEATS = 3
SHORT = 8
"""Tokens of the first completions, from which it is estimated how long ones the budget allows."""


def main(argv: list[str] | None = None) -> int:
    """Measure what the job asks for."""
    source, result = sys.argv[1:] if argv is None else argv
    Path(result).write_bytes(pickle.dumps(measure(pickle.loads(Path(source).read_bytes()))))
    return 0


def measure(job: Job) -> Measurement:
    """Costs of the job's format, and of training if it is asked for."""
    import torch

    from trl_qurl.lab.bench.training import build_policy, measure_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = build_policy(job.config_dir, device)
    started = time.perf_counter()
    llm = start_engine(job, policy)
    start_s = time.perf_counter() - started
    generation = measure_generation(llm, job)
    sync, weight_bytes = measure_sync(llm, policy, job)
    training = measure_training(policy, job.workload, job.budget) if job.measures_training else None
    return Measurement(EngineCosts(generation, sync, weight_bytes, start_s), training)


def start_engine(job: Job, policy: Any) -> LLM:
    """An engine as TRL's trainer starts it, with weights that were never loaded."""
    from vllm import LLM

    from trl_qurl.quantization.schemes import get_scheme
    from trl_qurl.quantization.storage import write_config
    from trl_qurl.rollout.directory import CheckpointDirectory
    from trl_qurl.rollout.engine.colocated import check_head_size
    from trl_qurl.rollout.engine.kernels import kernel_environment
    from trl_qurl.rollout.engine.served import WORKER_EXTENSION

    check_head_size(policy.config)
    workload = job.workload
    directory = CheckpointDirectory(None, 0)  # of a name by which vLLM finds again what it has compiled
    scheme = get_scheme(job.scheme) if job.scheme else None
    os.environ.update(kernel_environment(scheme))
    write_config(policy, directory.path, None if scheme is None else scheme.quantization_config(job.ignore))
    arguments = {
        "model": str(directory.path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": full_precision()[1],
        "max_model_len": workload.prompt_len + workload.completion_len,
        "max_num_seqs": workload.batch,
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": 0.3,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
    }
    return LLM(**{**arguments, **job.engine_kwargs})


def measure_generation(llm: LLM, job: Job) -> list[Timing]:
    """A whole batch of completions of one token, of a few, and of as many as the budget allows."""
    workload = job.workload
    prompts = make_prompts(job)

    def generate(tokens: int) -> float:
        from vllm import SamplingParams

        llm.reset_prefix_cache()  # as every sync does
        params = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    generate(min(2, workload.completion_len))  # a warm-up
    timings = [Timing(1, repeat(lambda: generate(1)))]
    if workload.completion_len > 1:
        short = min(SHORT, workload.completion_len)
        timings.append(Timing(short, repeat(lambda: generate(short))))
    if workload.completion_len > SHORT:
        rate = (timings[1].range.middle - timings[0].range.middle) / (timings[1].size - 1)
        affordable = (job.budget / REPEATS - timings[0].range.middle) / max(rate, 1e-9)
        longest = int(min(workload.completion_len, max(2 * SHORT, affordable)))
        if longest > SHORT:
            timings.append(Timing(longest, repeat(lambda: generate(longest))))
    return timings


def make_prompts(job: Job) -> list[Any]:
    """Random tokens, each prompt as often as there are completions of it; another process makes the same."""
    import torch
    from transformers import AutoConfig

    workload = job.workload
    vocabulary = AutoConfig.from_pretrained(job.config_dir).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch // workload.generations, workload.prompt_len)
    distinct = torch.randint(0, vocabulary, shape, generator=generator).tolist()
    return [{"prompt_token_ids": tokens} for tokens in distinct for _ in range(workload.generations)]


def measure_sync(llm: LLM, policy: Any, job: Job) -> tuple[Timing, int]:
    """Quantize and load, as a colocated trainer does before each rollout; and the bytes that arrive."""
    import torch

    from trl_qurl.lab.bench.training import seconds
    from trl_qurl.quantization.layers import linear_layer_names, quantized_layer_names
    from trl_qurl.quantization.schemes import get_scheme
    from trl_qurl.quantization.stream import quantize_weights, stored_tensors
    from trl_qurl.rollout.engine.colocated import ColocatedEngine
    from trl_qurl.rollout.engine.interface import WeightUpdate

    scheme = get_scheme(job.scheme) if job.scheme else None
    layers = (quantized_layer_names if scheme else linear_layer_names)(policy, job.ignore)
    engine = ColocatedEngine(llm)

    def parameters() -> Any:
        return ((name, parameter.data) for name, parameter in policy.named_parameters())

    def sync() -> float:
        started = seconds(policy)
        engine.load_stream(quantize_weights(parameters(), scheme, layers), [], WeightUpdate("bench"))
        return seconds(policy) - started

    sync()
    weight_bytes = sum(
        stored.nbytes
        for name, parameter in parameters()
        for stored in stored_tensors(name, parameter, scheme, layers, getattr(torch, full_precision()[1]))
    )
    return Timing(1, repeat(sync)), weight_bytes


def repeat(action: Callable[[], float]) -> list[float]:
    """Seconds of some repetitions."""
    return [action() for _ in range(REPEATS)]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
