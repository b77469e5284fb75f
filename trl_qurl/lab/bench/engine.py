"""Measure an engine with random weights: rollouts, and syncs of a policy.

No weights are loaded: the cost of a step does not depend on their values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from trl_qurl.lab.bench.memory import ENGINE_SHARE, WHOLE_SHARE
from trl_qurl.lab.bench.prediction import EngineCosts, Timing
from trl_qurl.lab.bench.training import build_policy, half_precision, seconds
from trl_qurl.lab.bench.workload import BUDGET, REPEATS, SHORT, Job
from trl_qurl.lab.comparison import find_scheme
from trl_qurl.lab.device import full_precision

if TYPE_CHECKING:
    from vllm import LLM


def measure_engine(job: Job) -> EngineCosts:
    """Measure the costs of the job's format."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    holding, rank = (device, job.workload.lora_rank) if job.holds_policy else (torch.device("meta"), 0)
    policy = build_policy(job.config_dir, holding, rank)
    llm = start_engine(job, policy)
    generation = measure_generation(llm, job)
    return EngineCosts(generation, *measure_sync(llm, policy, job, device))


def start_engine(job: Job, policy: Any) -> LLM:
    """Start an engine like TRL's trainer, with dummy weights."""
    from vllm import LLM

    from trl_qurl.quantization.layers import ignored_modules
    from trl_qurl.quantization.storage import write_config
    from trl_qurl.rollout.directory import CheckpointDirectory
    from trl_qurl.rollout.engine.cpu_checks import check_cpu_build
    from trl_qurl.rollout.engine.kernels import kernel_environment
    from trl_qurl.rollout.engine.served import WORKER_EXTENSION

    policy = getattr(policy, "get_base_model", lambda: policy)()
    check_cpu_build(policy.config)
    workload, is_gpu = job.workload, torch.cuda.is_available()
    shares_device = job.holds_policy or not is_gpu  # on a CPU, syncs need memory, too
    directory = CheckpointDirectory(None, 0)  # its name lets vLLM find its compilation cache again
    scheme = find_scheme(job.part)
    os.environ.update(kernel_environment(scheme))
    ignored = ignored_modules(policy, job.ignore)
    write_config(policy, directory.path, None if scheme is None else scheme.quantization_config(ignored))
    arguments = {
        "model": str(directory.path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": full_precision()[1],
        "max_model_len": workload.length,
        "max_num_seqs": workload.batch,
        "max_num_batched_tokens": 4096,
        "gpu_memory_utilization": ENGINE_SHARE if shares_device else WHOLE_SHARE,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "enforce_eager": not is_gpu,  # on a CPU, vLLM compiles for minutes
    }
    return LLM(**{**arguments, **job.engine_kwargs})


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

    def timing(tokens: int) -> Timing:
        return Timing(tokens, [generate(tokens) for _ in range(REPEATS)])

    generate(2)  # warm-up
    first, short = timing(1), timing(SHORT)
    rate = (short.range.middle - first.range.middle) / (SHORT - 1)
    affordable = (BUDGET / REPEATS - first.range.middle) / max(rate, 1e-9)
    return [first, short, timing(int(min(workload.completion_len, max(2 * SHORT, affordable))))]


def make_prompts(job: Job) -> list[dict[str, list[int]]]:
    """Generate random prompts, each repeated once per completion; identical in every process."""
    from transformers import AutoConfig

    workload = job.workload
    vocabulary = AutoConfig.from_pretrained(job.config_dir).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch // workload.generations, workload.prompt_len)
    distinct = torch.randint(0, vocabulary, shape, generator=generator).tolist()
    return [{"prompt_token_ids": tokens} for tokens in distinct for _ in range(workload.generations)]


def measure_sync(llm: LLM, policy: Any, job: Job, device: torch.device) -> tuple[Timing, int]:
    """Time quantizing and loading, as in a colocated trainer before each rollout; also return the bytes loaded."""
    from trl_qurl.quantization.checkpoint_form import parameter_name
    from trl_qurl.quantization.stream import WeightStream
    from trl_qurl.rollout.engine.colocated import ColocatedEngine
    from trl_qurl.rollout.engine.interface import WeightUpdate

    weights = WeightStream(policy, find_scheme(job.part), job.ignore)
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
    return Timing(1, [sync() for _ in range(REPEATS)]), weights.nbytes(half_precision())
