"""Measure the parts of a step with random weights: rollouts and syncs in one format, or learning
from a rollout.

No weights are loaded: the cost of a step does not depend on their values. Passes match TRL's
trainer: 32-bit weights with 16-bit autocast on a GPU (and on a CPU with instructions for it), and
TRL's output head, which scores only the completions and never materializes all logits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from trl_qurl.lab.bench.prediction import EngineCosts, Timing, TrainingCosts
from trl_qurl.lab.bench.workload import (
    BUDGET,
    ENGINE_SHARE,
    REPEATS,
    SHORT,
    WHOLE_SHARE,
    Job,
    Workload,
)
from trl_qurl.lab.device import cpu_settings, full_precision

if TYPE_CHECKING:
    from vllm import LLM

GRADIENT_NORM = 1.0
NOT_SCORED = -100


def half_precision() -> torch.dtype:
    """Return the 16-bit dtype of the engine and the passes."""
    return getattr(torch, full_precision()[1])


def build_policy(config_dir: str, device: torch.device, lora_rank: int = 0) -> Any:
    """Build the model with random float32 weights, as in a trainer, and a new adapter if
    `lora_rank` > 0.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(config_dir)
    with device:
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy.config.architectures = [type(policy).__name__]
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(
            policy, LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    return policy


def seconds(device: torch.device) -> float:
    """Read the clock after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_engine(job: Job) -> EngineCosts:
    """Measure the costs of the job's format."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    holding, rank = (
        (device, job.workload.lora_rank) if job.holds_policy else (torch.device("meta"), 0)
    )
    policy = build_policy(job.config_dir, holding, rank)
    llm = start_engine(job, policy)
    generation = measure_generation(llm, job)
    return EngineCosts(generation, *measure_sync(llm, policy, job, device))


def start_engine(job: Job, policy: Any) -> LLM:
    """Start an engine like TRL's trainer, with dummy weights."""
    from vllm import LLM

    from trl_qurl.quantization.plan import make_plan
    from trl_qurl.quantization.storage import write_config
    from trl_qurl.rollout.directory import CheckpointDirectory
    from trl_qurl.rollout.engine.hardware import check_cpu_build, kernel_environment
    from trl_qurl.rollout.repairs.cpu_memory import cpu_cache_arguments
    from trl_qurl.rollout.wire import WORKER_EXTENSION

    policy = getattr(policy, "get_base_model", lambda: policy)()
    plan = make_plan(policy, job.part, job.ignore)
    check_cpu_build(policy.config, plan.schemes, {"dtype": full_precision()[1]})
    workload, is_gpu = job.workload, torch.cuda.is_available()
    shares_device = job.holds_policy or not is_gpu  # on a CPU, syncs need memory, too
    directory = CheckpointDirectory(None, 0)  # its name lets vLLM find its compilation cache again
    os.environ.update(kernel_environment(*plan.targets))
    write_config(policy, directory.path, plan.quantization_config())
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
    load = {"sequences": workload.batch, "length": workload.length}
    arguments |= cpu_cache_arguments(str(directory.path), job.engine_kwargs, **load)
    return LLM(**{**arguments, **job.engine_kwargs})


def measure_generation(llm: LLM, job: Job) -> list[Timing]:
    """Time a whole batch with completions of one token, of a few,
    and as long as the budget allows.
    """
    from vllm import SamplingParams

    workload, prompts = job.workload, make_prompts(job)

    def generate(tokens: int) -> float:
        llm.reset_prefix_cache()  # like every sync
        params = SamplingParams(
            max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
        )
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
    return [
        {"prompt_token_ids": tokens} for tokens in distinct for _ in range(workload.generations)
    ]


def measure_sync(llm: LLM, policy: Any, job: Job, device: torch.device) -> tuple[Timing, int]:
    """Time quantizing and loading, as in a colocated trainer before each rollout; also return the
    bytes loaded.
    """
    from trl_qurl.quantization.merging import model_parameters
    from trl_qurl.quantization.plan import make_plan
    from trl_qurl.quantization.stream import WeightStream
    from trl_qurl.rollout.engine.colocated import ColocatedEngine
    from trl_qurl.rollout.wire import WeightUpdate

    weights = WeightStream(policy, make_plan(policy, job.part, job.ignore))
    engine = ColocatedEngine(llm)
    is_peft = job.holds_policy and job.workload.lora_rank > 0
    shapes = (
        {}
        if job.holds_policy
        else {p.shape: torch.rand(p.shape, device=device) for p in policy.parameters()}
    )

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model_parameters(policy, merges=is_peft):
            yield name, parameter if job.holds_policy else shapes[parameter.shape]

    def sync() -> float:
        started = seconds(device)
        engine.load_stream(weights.tensors(parameters()), WeightUpdate("bench"))
        return seconds(device) - started

    sync()
    return Timing(1, [sync() for _ in range(REPEATS)]), weights.nbytes(half_precision())


def measure_training(job: Job) -> TrainingCosts:
    """Time scoring, updates and the optimizer, at sizes that the budget allows."""
    workload = job.workload
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = build_policy(job.config_dir, device, workload.lora_rank)
    prepare_policy(policy)

    def score(rows: int) -> None:
        with torch.no_grad():
            log_probabilities(policy, rows, workload)

    def update(rows: int) -> None:
        log_probabilities(policy, rows, workload).mean().backward()

    scoring, updating = (time_passes(action, workload, device) for action in (score, update))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, fused=device.type == "cuda")

    def step() -> float:
        started = seconds(device)
        torch.nn.utils.clip_grad_norm_(trained, GRADIENT_NORM)
        optimizer.step()
        return seconds(device) - started

    step()  # creates the optimizer's state
    return TrainingCosts(scoring, updating, Timing(1, [step() for _ in range(REPEATS)]))


def prepare_policy(policy: Any) -> None:
    """Set up a policy to run its passes as in TRL's trainer, with gradient checkpointing."""
    from trl.trainer import add_fused_lm_head

    policy.train()
    model = getattr(policy, "get_base_model", lambda: policy)()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.config.use_cache = False


def log_probabilities(policy: Any, rows: int, workload: Workload) -> torch.Tensor:
    """Compute log-probabilities of the completions (rows, completion_len) in random sequences."""
    vocabulary = policy.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, (rows, workload.length), device=policy.device)
    labels = tokens.clone()
    labels[:, : workload.prompt_len] = NOT_SCORED
    is_16_bit = policy.device.type == "cuda" or cpu_settings().get("bf16")
    autocast = torch.autocast(policy.device.type, half_precision()) if is_16_bit else nullcontext()
    with autocast:
        outputs = policy(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            labels=labels,
            fused_lm_head=True,
        )
    return outputs.log_probs[:, -workload.completion_len :]


def time_passes(action: Callable[[int], None], workload: Workload, device: torch.device) -> Timing:
    """Time passes over as many of the completions of a whole pass as the budget allows."""

    def duration(rows: int) -> float:
        started = seconds(device)
        action(rows)
        return seconds(device) - started

    duration(1)  # warm-up
    rows = max(1, min(workload.train_batch, int(BUDGET / REPEATS / duration(1))))
    return Timing(rows * workload.length, [duration(rows) for _ in range(REPEATS)])
