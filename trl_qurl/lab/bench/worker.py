"""Measure an engine with random weights, or training, in a separate process.

    python -m trl_qurl.lab.bench.worker JOB RESULT

An engine's memory is freed only when its process ends. No weights are loaded: the cost of a step does not depend on
their values.
"""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.bench.costs import EngineCosts, Timing, TrainingCosts
from trl_qurl.lab.bench.workload import Job

if TYPE_CHECKING:
    import torch
    from vllm import LLM

REPEATS = 3
SHORT = 8
"""Length of the first completions, from which we estimate the longest that the budget allows."""


def main(argv: list[str] | None = None) -> int:
    """Run the job in one file and write its result to another."""
    source, result = sys.argv[1:] if argv is None else argv
    Path(result).write_bytes(pickle.dumps(measure(pickle.loads(Path(source).read_bytes()))))
    return 0


def measure(job: Job) -> EngineCosts | TrainingCosts:
    """Measure the costs of the job's format, or of training."""
    import torch

    from trl_qurl.lab.bench.training import build_policy, measure_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rank = job.workload.lora_rank
    if job.part == "training":
        return measure_training(build_policy(job.config_dir, device, rank), job.workload, job.budget)
    policy_device = device if job.holds_policy else torch.device("meta")
    policy = build_policy(job.config_dir, policy_device, rank if job.holds_policy or job.adapter else 0)
    started = time.perf_counter()
    llm = start_engine(job, policy)
    start_s = time.perf_counter() - started
    if job.adapter:  # sync first: the engine uses the adapter only once it has arrived
        sync, weight_bytes = measure_adapter_sync(llm, policy, job, device)
        generation = measure_generation(llm, job)
    else:
        generation = measure_generation(llm, job)
        sync, weight_bytes = measure_sync(llm, policy, job, device)
    return EngineCosts(generation, sync, weight_bytes, start_s)


def start_engine(job: Job, policy: Any) -> LLM:
    """Start an engine like TRL's trainer, with dummy weights."""
    import torch
    from vllm import LLM

    from trl_qurl.lab.bench.memory import ENGINE_SHARE, WHOLE_SHARE
    from trl_qurl.lab.device import full_precision
    from trl_qurl.quantization.formats import get_scheme
    from trl_qurl.quantization.layers import ignored_modules
    from trl_qurl.quantization.storage import write_config
    from trl_qurl.rollout.directory import CheckpointDirectory
    from trl_qurl.rollout.engine.colocated import adapter_arguments, check_head_size, with_adapter
    from trl_qurl.rollout.engine.kernels import kernel_environment
    from trl_qurl.rollout.engine.served import WORKER_EXTENSION

    policy = getattr(policy, "get_base_model", lambda: policy)()
    check_head_size(policy.config)
    workload = job.workload
    shares_device = job.holds_policy or not torch.cuda.is_available()  # on a CPU, syncs need memory, too
    directory = CheckpointDirectory(None, 0)  # its name lets vLLM find its compilation cache again
    scheme = get_scheme(job.scheme) if job.scheme else None
    os.environ.update(kernel_environment(scheme))
    ignored = ignored_modules(policy, job.ignore)
    write_config(policy, directory.path, None if scheme is None else scheme.quantization_config(ignored))
    arguments = {
        "model": str(directory.path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": full_precision()[1],
        "max_model_len": workload.prompt_len + workload.completion_len,
        "max_num_seqs": workload.batch,
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": ENGINE_SHARE if shares_device else WHOLE_SHARE,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if job.adapter:
        arguments |= adapter_arguments(workload.lora_rank)
        arguments["load_format"] = "dummy"
        if not torch.cuda.is_available():
            from trl_qurl.lab.bench.loader import CPU_DUMMY_FORMAT

            arguments["load_format"] = CPU_DUMMY_FORMAT
    engine = with_adapter(LLM) if job.adapter else LLM
    return engine(**{**arguments, **job.engine_kwargs})


def measure_generation(llm: LLM, job: Job) -> list[Timing]:
    """Time a whole batch with completions of one token, of a few, and as long as the budget allows."""
    from vllm import SamplingParams

    workload, prompts = job.workload, make_prompts(job)

    def generate(tokens: int) -> float:
        llm.reset_prefix_cache()  # like every sync
        params = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    generate(min(2, workload.completion_len))  # warm-up
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


def make_prompts(job: Job) -> list[dict[str, list[int]]]:
    """Generate random prompts, each repeated once per completion; identical in every process."""
    import torch
    from transformers import AutoConfig

    workload = job.workload
    vocabulary = AutoConfig.from_pretrained(job.config_dir).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch // workload.generations, workload.prompt_len)
    distinct = torch.randint(0, vocabulary, shape, generator=generator).tolist()
    return [{"prompt_token_ids": tokens} for tokens in distinct for _ in range(workload.generations)]


def measure_sync(llm: LLM, policy: Any, job: Job, device: torch.device) -> tuple[Timing, int]:
    """Time quantizing and loading, as in a colocated trainer before each rollout; also return the bytes loaded."""
    import torch

    from trl_qurl.lab.bench.training import seconds
    from trl_qurl.quantization.checkpoint_form import parameter_name
    from trl_qurl.quantization.formats import get_scheme
    from trl_qurl.quantization.weight_stream import WeightStream
    from trl_qurl.rollout.engine.colocated import ColocatedEngine
    from trl_qurl.rollout.engine.interface import WeightUpdate

    weights = WeightStream(policy, get_scheme(job.scheme) if job.scheme else None, job.ignore)
    engine = ColocatedEngine(llm)
    is_peft = job.holds_policy and job.workload.lora_rank > 0
    shapes = {} if job.holds_policy else {p.shape: torch.rand(p.shape, device=device) for p in policy.parameters()}

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in policy.named_parameters():
            if ".lora_" not in name:
                yield parameter_name(name), parameter.data if job.holds_policy else shapes[parameter.shape]

    def sync() -> float:
        started = seconds(device)
        if is_peft:
            policy.merge_adapter()
        engine.load_stream(weights.tensors(parameters()), [], WeightUpdate("bench"))
        if is_peft:
            policy.unmerge_adapter()
        return seconds(device) - started

    sync()
    return Timing(1, repeat(sync)), weight_bytes(policy, job)


def measure_adapter_sync(llm: LLM, policy: Any, job: Job, device: torch.device) -> tuple[Timing, int]:
    """Time writing and loading the adapter, as in a colocated trainer; also return the bytes of base and adapter.

    If the policy is on the meta device, the adapter is filled with zeros.
    """
    import torch

    from trl_qurl.lab.bench.training import half_precision, seconds
    from trl_qurl.rollout.adapter import adapter_tensors, write_adapter
    from trl_qurl.rollout.directory import CheckpointDirectory
    from trl_qurl.rollout.engine.colocated import ColocatedEngine
    from trl_qurl.rollout.engine.interface import WeightUpdate

    engine, directory, numbers = ColocatedEngine(llm), CheckpointDirectory(None, 0), itertools.count()
    sizes: dict[str, int] = {}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in adapter_tensors(policy, half_precision()):
            sizes[name] = tensor.nbytes
            yield name, torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor

    def sync() -> float:
        started = seconds(device)
        path = directory.path / f"sync-{next(numbers)}"
        write_adapter(policy, tensors(), path)
        engine.load_adapter(path, WeightUpdate("bench"))
        shutil.rmtree(path)
        return seconds(device) - started

    sync()
    return Timing(1, repeat(sync)), weight_bytes(policy, job) + sum(sizes.values())


def weight_bytes(policy: Any, job: Job) -> int:
    """Compute the size of the engine's weights, in the engine's dtype where they are not quantized."""
    from trl_qurl.lab.bench.training import half_precision
    from trl_qurl.quantization.formats import get_scheme
    from trl_qurl.quantization.weight_stream import WeightStream

    return WeightStream(policy, get_scheme(job.scheme) if job.scheme else None, job.ignore).nbytes(half_precision())


def repeat(action: Callable[[], float]) -> list[float]:
    """Time `REPEATS` repetitions, in seconds."""
    return [action() for _ in range(REPEATS)]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
