"""A real trial: a tiny random policy, trained for two steps on rollouts in one format.

Then its engine, which loaded new weights before each rollout, is compared with one that started
from them. It needs no download.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trl_qurl.lab.doctor.report import Line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast
    from vllm import LLM

    from trl_qurl import QuRLGRPOTrainer

STEPS = 2  # the second rollout uses weights that the first step changed
PROMPTS = [[token] * 8 for token in range(1, 9)]
LIKELIEST = 20  # tokens to compare per position: vLLM's default `max_logprobs`
LIMIT = 0.05  # nats. Rounding explains a hundredth; a graph that reads old memory, whole nats

Continuation = list[dict[int, float]]
"""Log-probabilities of the likeliest tokens at each position, in nats."""


def check(form: str, name: str, engine: Mapping[str, Any] = MappingProxyType({})) -> list[Line]:
    """Train, load the last weights, and compare answers; `engine` adds arguments for vLLM.

    For the trial `"sleep"`, the engine sleeps between rollouts.
    """
    sleeps = name == "sleep"
    trainer = build_trainer(form, engine=engine, vllm_enable_sleep_mode=sleeps)
    llm = trainer.vllm_generation.llm
    [kernels] = llm.apply_model(_kernel_names)
    kl = train(trainer)
    trainer.vllm_generation.sync_weights()
    if sleeps:
        llm.wake_up(tags=["kv_cache"])  # as TRL does before it generates
    new = build_trainer(form, trainer.model, engine).vllm_generation.llm
    distance = largest_difference(continue_greedily(llm), continue_greedily(new))
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name
    layers = ", ".join(kernels) or "unquantized layers"
    [description] = llm.collective_rpc("describe_rollouts")
    runner = description["runner"]
    text = (
        f"trained {STEPS} steps with {layers} and Model Runner {runner}, KL of actor and policy up "
        f"to {kl:.1e} nats. Then a new engine differs by {distance:.1e} nats in a log-probability "
        f"(CUDA graphs: {mode})"
    )
    if not distance <= LIMIT:
        raise RuntimeError(f"{text}: the one that was trained with reads other weights")
    data = {"kl": kl, "kernels": kernels, "distance": distance}
    data |= {"cuda_graphs": mode, "runner": runner}
    return [Line(name, text, data=data)]


def train(trainer: QuRLGRPOTrainer) -> float:
    """Train, and return the largest KL of actor and policy, in nats per token.

    The tokens of the next rollout check what the engine computes with each sync, and digests what
    a server received. The trainer raises.
    """
    trainer.train()
    rows = [row for row in trainer.state.log_history if "mismatch/kl_k3" in row]
    if not all(math.isfinite(row["loss"]) for row in rows):
        raise RuntimeError(f"A step has no finite loss: {rows}")
    return max(row["mismatch/kl_k3"] for row in rows)


def continue_greedily(llm: LLM) -> list[Continuation]:
    """Continue each of `PROMPTS` with its eight likeliest tokens, past end tokens."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=LIKELIEST, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    continuations = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        continuation = []
        for likeliest in output.outputs[0].logprobs:
            continuation.append({token: entry.logprob for token, entry in likeliest.items()})
        continuations.append(continuation)
    return continuations


def largest_difference(first: list[Continuation], second: list[Continuation]) -> float:
    """Return the largest difference in a likely token's log-probability, in nats.

    Positions count while the continuations agree.
    """
    differences = [0.0]
    for one, other in zip(first, second, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            common = ours.keys() & theirs.keys()
            differences += [abs(ours[token] - theirs[token]) for token in common]
            if max(ours, key=ours.__getitem__) != max(theirs, key=theirs.__getitem__):
                break
    return float(np.max(differences))  # unlike Python's, NaN if one is


def sum_of_tokens(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """Reward function that differs between completions."""
    return [float(sum(tokens)) for tokens in completion_ids]


def build_policy(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a random policy whose biases are large, as in real ones.

    Biases of zero would be right in any order. All quantized layers are multiples of 128, the size
    of groups, blocks and kernel tiles. All attention kernels support heads of 64, and vLLM assumes
    that they add up to hidden_size.
    """
    from trl_qurl.lab.demo.warm_start import build_model

    model = build_model(tokenizer, seed=0, width=256, layers=2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def build_trainer(
    form: str,
    policy: PreTrainedModel | None = None,
    engine: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> QuRLGRPOTrainer:
    """Build a trainer that checks every sync, with its engine or connected to a server."""
    from datasets import Dataset

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
    from trl_qurl.lab.demo.task import build_tokenizer, sample_problems
    from trl_qurl.lab.device import full_precision, use_one_gpu
    from trl_qurl.quantization.plan import read_formats

    use_one_gpu()
    tokenizer = build_tokenizer()
    prompts = [problem.prompt for problem in sample_problems(64, seed=0)]
    has_gpu = torch.cuda.is_available()
    dtype = full_precision()[1]
    if "vllm_mode" not in settings:
        # Compile as in a real run, except on a CPU, where it takes minutes.
        options = {"dtype": dtype, "enforce_eager": not has_gpu, "kv_cache_memory_bytes": 2**26}
        settings |= {"vllm_max_model_length": 64, "vllm_engine_kwargs": {**options, **engine}}
    config = QuRLGRPOConfig(
        output_dir=tempfile.mkdtemp(),  # in the child's temporary directory, which is deleted
        rollout_quantization=read_formats(form),
        smooth_activations=False,  # a new engine would be smoothed for other weights
        sync_check_interval=1,
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=STEPS,
        logging_steps=1,
        bf16=has_gpu and dtype == "bfloat16",
        fp16=has_gpu and dtype == "float16",
        use_cpu=not has_gpu,
        report_to="none",
        **settings,
    )
    return QuRLGRPOTrainer(
        model=policy or build_policy(tokenizer),
        reward_funcs=sum_of_tokens,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
    )


def _kernel_names(model: torch.nn.Module) -> list[str]:
    """Return the class names of the kernels in a model's quantized layers."""
    names: set[str] = set()
    for layer in model.modules():
        scheme = getattr(layer, "scheme", None)
        if scheme is not None:
            names.update(type(part).__name__ for part in vars(scheme).values())
    return sorted(name for name in names if "Kernel" in name)
