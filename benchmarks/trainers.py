"""Real trainers on models of random weights, as the benchmarks of
rollouts and steps compare them.
"""

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shapes import Shape
from transformers import PrinterCallback
from weight_sync import characters

from trl_qurl.lab.device import cpu_settings

TRL = "plain TRL"
TRANSFORMERS = "TRL, transformers"
LLMCOMPRESSOR = "llm-compressor"

WAYS = {
    TRL: {"use_vllm": True, "vllm_mode": "colocate"},
    TRANSFORMERS: {"use_vllm": False},
    "bf16": {"rollout_quantization": None},
    "int8": {"rollout_quantization": "int8"},
    "fp8": {"rollout_quantization": "fp8"},
    LLMCOMPRESSOR: {"rollout_quantization": "int8", "weight_sync": "llmcompressor"},
}
"""Name to what distinguishes it: TRL's own trainer with rollouts by vLLM or transformers, and ours
in each format.
"""


@dataclass(frozen=True)
class Load:
    """
    One rollout: completions and their tokens, how they are learned from, and in which precision.

    Attributes:
        completions: Number of completions.
        tokens: Of each completion.
        prompt: Characters of each prompt, each of them a token.
        train_batch: Completions in one forward and backward pass.
        updates: Optimizer updates per rollout.
        lora_rank: Rank of the adapter to train; 0 trains the whole model.
        dtype: Of the trainer's weights.
        engine_dtype: Of our engine's 16-bit layers; plain TRL has no such setting.
    """

    completions: int = 8
    tokens: int = 128
    prompt: int = 28
    train_batch: int = 8
    updates: int = 1
    lora_rank: int = 0
    dtype: str = "float32"
    engine_dtype: str | None = None


def build_trainer(
    way: str,
    shape: Shape | str,
    load: Load,
    device: str,
    callbacks: Sequence[Any] = (),
    peft_config: Any = None,
    **further: Any,
) -> Any:
    """
    A trainer with an engine in this process; completions always have the full length.

    Args:
        way: A name in `WAYS`.
        shape: The model, with random weights; or a directory that holds a model.
        load: A rollout of it.
        device: `"cpu"` or `"cuda"`.
        callbacks: Come before the trainer's own.
        peft_config: The adapter that is trained instead of the model, if there is one.
        further: Settings of the trainer's config that override those of the way.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

    os.environ["MASTER_PORT"] = str(free_port())  # several trainers run side by side
    passes = load.completions // load.train_batch
    settings = {
        "per_device_train_batch_size": load.train_batch,
        "steps_per_generation": passes,
        "gradient_accumulation_steps": passes // load.updates,
        "num_generations": min(8, load.completions),
        "max_completion_length": load.tokens,
        "max_steps": load.updates,
        "learning_rate": 1e-6,
        "logging_steps": 1,
        "vllm_max_model_length": load.prompt + load.tokens,
        "vllm_gpu_memory_utilization": 0.3,
        "generation_kwargs": {"ignore_eos": True},
        "use_cpu": device == "cpu",
        "bf16": trains_in_bf16(device),
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    } | further
    directory = tempfile.mkdtemp(dir="/dev/shm" if device == "cpu" else None)
    dtype = getattr(torch, load.dtype)
    model: Any
    tokenizer: Any
    if isinstance(shape, Shape):
        # On a GPU from the start, because drawing 7 billion random weights on a CPU takes minutes.
        model, tokenizer = shape.build(dtype, torch.device(device)), characters()
    else:
        model = AutoModelForCausalLM.from_pretrained(shape, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(shape)
    if load.lora_rank and peft_config is None:
        from peft import LoraConfig

        peft_config = LoraConfig(
            r=load.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    if way == TRL:
        # TRL's engine loads the model by its name.
        model.save_pretrained(f"{directory}/model")
        tokenizer.save_pretrained(f"{directory}/model")
        # TRL's default is float32
        model, settings["model_init_kwargs"] = f"{directory}/model", {"dtype": load.dtype}
        if device == "cuda":
            torch.cuda.empty_cache()  # TRL loads its own copy
    if way in (TRL, TRANSFORMERS):
        kind, config = _timed_grpo_trainer(), GRPOConfig(directory, **(settings | WAYS[way]))
    else:
        own: dict[str, Any] = {"sync_check_interval": 0, "objective": "acr"}
        engine: dict[str, Any] = {"enforce_eager": device == "cpu"}  # compiling takes minutes there
        if load.engine_dtype is not None:
            engine["dtype"] = load.engine_dtype
        own["vllm_engine_kwargs"] = engine
        kind, config = (
            QuRLGRPOTrainer,
            QuRLGRPOConfig(directory, **(settings | own | WAYS[way] | further)),
        )
    trainer = kind(
        model=model,
        reward_funcs=lambda completions, **kwargs: [
            float(len(completion)) for completion in completions
        ],
        args=config,
        train_dataset=Dataset.from_dict(
            {"prompt": [prompt(load.prompt, number) for number in range(64)]}
        ),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)  # the log is read, not looked at
    return trainer


def _timed_grpo_trainer() -> type:
    """TRL's trainer, which logs the seconds of its generation (with its sync, if vLLM generates) as
    ours does.
    """
    from trl import GRPOTrainer

    class TimedGRPOTrainer(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            generated = super()._generate_single_turn(*args, **kwargs)
            self._metrics["train"]["time/generate_s"].append(time.perf_counter() - started)
            return generated

    return TimedGRPOTrainer


def add_precision_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the precision of trainer and engine, by the names of `Load`."""
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default=Load.dtype,
        help="of the trained weights",
    )
    parser.add_argument(
        "--engine-dtype",
        help="of the engine's 16-bit layers; float32 for CPUs that emulate bfloat16",
    )


def trains_in_bf16(device: str) -> bool:
    """As `trl-qurl grpo` does: on a CPU where it has instructions for bfloat16."""
    return device == "cuda" or cpu_settings().get("bf16", False)


def prompt(length: int, number: int) -> str:
    """Some text of that many characters."""
    return (f"{number:02}" + " What is the capital of France?" * (length // 31 + 1))[:length]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
