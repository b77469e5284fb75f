"""A real trial: a tiny random policy, trained for two steps on rollouts in one format.

It needs no download.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch

from trl_qurl.lab.doctor.report import Line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from trl_qurl import QuRLGRPOTrainer

STEPS = 2  # the second rollout uses weights that the first step changed


def check(form: str, name: str) -> list[Line]:
    """Start an engine and train."""
    started = time.perf_counter()
    trainer = build_trainer(form)
    start_seconds = time.perf_counter() - started
    [kernels] = trainer.vllm_generation.llm.apply_model(_kernel_names)
    return [describe(name, start_seconds, kernels, train(trainer))]


def train(trainer: QuRLGRPOTrainer) -> list[dict[str, float]]:
    """Train, and return the rows of the log.

    The trainer verifies each sync with digests and the tokens of the next rollout, and raises.
    """
    trainer.train()
    rows = [row for row in trainer.state.log_history if "time/sync_s" in row]
    are_sound = [math.isfinite(row["loss"]) and row["time/sync_check_s"] > 0 for row in rows]
    if len(rows) < STEPS or not all(are_sound):
        raise RuntimeError(f"A step has no finite loss, or no digests of its sync: {rows}")
    return rows


def describe(
    name: str, start_seconds: float, kernels: list[str], rows: list[dict[str, float]]
) -> Line:
    """Report the engine, and the worst mismatch of all steps."""
    kls = [row["mismatch/kl_k3"] for row in rows]
    start = f"engine started in {start_seconds:.0f} s"
    if kernels:
        start += f" with {kernels[0]}"
    text = (
        f"{start}; {len(rows)} steps with matching digests, KL of actor and policy up to "
        f"{max(kls):.1e} nats"
    )
    return Line(name, text, data={"kl": kls, "kernels": kernels})


def even_tokens(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """Reward function that differs between completions: the share of even token ids."""
    rewards = []
    for tokens in completion_ids:
        even = [token for token in tokens if token % 2 == 0]
        rewards.append(len(even) / max(1, len(tokens)))
    return rewards


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
    form: str, policy: PreTrainedModel | None = None, **settings: Any
) -> QuRLGRPOTrainer:
    """Build a trainer that checks every sync, with its engine or connected to a server."""
    from datasets import Dataset

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
    from trl_qurl.lab.demo.task import build_tokenizer, sample_problems
    from trl_qurl.lab.device import full_precision
    from trl_qurl.quantization.plan import read_formats

    # With several GPUs, the trainer would wrap the model for all of them.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    tokenizer = build_tokenizer()
    prompts = [problem.prompt for problem in sample_problems(64, seed=0)]
    has_gpu = torch.cuda.is_available()
    dtype = full_precision()[1]
    if "vllm_mode" not in settings:
        # Compile as in a real run, except on a CPU, where it takes minutes.
        options = {"dtype": dtype, "enforce_eager": not has_gpu, "kv_cache_memory_bytes": 2**26}
        settings |= {"vllm_max_model_length": 64, "vllm_engine_kwargs": options}
    config = QuRLGRPOConfig(
        output_dir=tempfile.mkdtemp(),  # in the child's temporary directory, which is deleted
        rollout_quantization=read_formats(form),
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
        reward_funcs=even_tokens,
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
