"""How much memory do policy and critic take together, against the sum of both alone?

    python benchmarks/ppo_memory.py
    python benchmarks/ppo_memory.py --layers 2 --hidden 128 --vocabulary 1000

Real trainers with real colocated engines train for two optimizer steps in processes of their own, on random weights of
Qwen3's proportions: GRPO is the policy alone, PPO is both. The critic alone makes the same steps by itself. Peaks are
over the process after its imports: resident memory on a CPU, torch's allocations on a GPU. The trainer runs the two
models one after the other, so the activations of one are gone when those of the other are made.
"""

import argparse
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from apart import measure_apart
from provenance import provenance, write_record
from quantizer import Shape
from rich.console import Console
from rich.table import Table
from weight_sync import characters

CASES = {
    "policy": "policy alone (GRPO)",
    "critic": "critic alone",
    "both": "policy and critic (PPO)",
}
UPDATES = 2
COMPLETION_TOKENS = 128


def settings(directory: Path, case: str, completions: int, device: str) -> Any:
    """The same run for all cases."""
    from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig

    common: dict[str, Any] = {
        "output_dir": str(directory / "out"),
        "per_device_train_batch_size": completions,
        "steps_per_generation": UPDATES,
        "max_steps": UPDATES,
        "max_completion_length": COMPLETION_TOKENS,
        "sync_check_interval": 0,
        "vllm_max_model_length": 256,
        "vllm_gpu_memory_utilization": 0.2,
        "vllm_engine_kwargs": {"enforce_eager": True},
        "generation_kwargs": {"ignore_eos": True},
        "use_cpu": device == "cpu",
        "bf16": device == "cuda",
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    if case == "policy":
        return QuRLGRPOConfig(**common, num_generations=completions)
    return QuRLPPOConfig(**common)


def measure(case: str, directory: Path, completions: int, device: str) -> Iterator[dict[str, float]]:
    """Yields the bytes at the peak, over what the imports took."""
    from datasets import Dataset

    from trl_qurl import QuRLGRPOTrainer, QuRLPPOTrainer

    args = settings(directory, case, completions, device)
    before = resident()
    if case == "critic":
        train_critic(str(directory / "model"), args)
    else:
        trainer = (QuRLGRPOTrainer if case == "policy" else QuRLPPOTrainer)(
            model=str(directory / "model"),
            reward_funcs=lambda completions, **kwargs: [float(len(set(completion))) for completion in completions],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["What is the capital of France?"] * 64}),
        )
        trainer.train()
    if device == "cuda":
        yield {"peak_bytes": torch.cuda.max_memory_allocated()}
    else:
        yield {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before}


def train_critic(model: str, args: Any) -> None:
    """The critic's share of PPO by itself: values of a rollout, then its updates."""
    from accelerate import Accelerator
    from transformers import Trainer

    from trl_qurl.trainers.critic import Critic, build_value_model

    critic_model = build_value_model(model, characters(), {"device_map": None, **(args.model_init_kwargs or {})})
    accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if args.bf16 else "no")
    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    kwargs |= {"lr": args.critic_learning_rate, "weight_decay": args.weight_decay}
    critic = Critic(critic_model, args, accelerator)
    critic.prepare(lambda model: optimizer_class(model.parameters(), **kwargs))
    prompt = 30
    ids = torch.randint(2, 90, (args.per_device_train_batch_size, prompt + COMPLETION_TOKENS))
    ids = ids.to(accelerator.device)
    batch = {"prompt_ids": ids[:, :prompt], "completion_ids": ids[:, prompt:]}
    batch |= {name.replace("ids", "mask"): torch.ones_like(part) for name, part in batch.items()}
    for _ in range(UPDATES):
        old = critic.rollout_values(batch, len(ids))
        critic.learn(batch, lambda values, old=old: (values - old - 1).square().mean())
        critic.step()


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def print_table(record: dict[str, Any], console: Console) -> None:
    """What was measured, and the sum that it is compared with."""
    cells = record["cells"]
    table = Table(title=f"Peak memory, {record['parameters'] / 1e6:.0f} million parameters, {record['hardware']}")
    for column in ("", "GB", "of the sum"):
        table.add_column(column, justify="left" if not column else "right")
    peaks = {case: cell.get("peak_bytes") for case, cell in cells.items()}
    total = peaks["policy"] and peaks["critic"] and peaks["policy"] + peaks["critic"]
    rows = [(CASES[case], peaks[case]) for case in ("policy", "critic")] + [("sum of both alone", total)]
    rows += [(CASES[case], peaks[case]) for case in ("both",)]
    for label, peak in rows:
        if peak is None:
            table.add_row(label, "failed", "")
        else:
            table.add_row(label, f"{peak / 1e9:.2f}", f"{peak / total:.0%}" if total else "")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine's memory is in the sum on both sides
    shape = Shape(arguments.layers, arguments.hidden, arguments.vocabulary)
    console = Console(width=None if sys.stdout.isatty() else 140)
    record = {"benchmark": "ppo_memory", **provenance(torch.device(arguments.device), measured="trl_qurl")}
    record |= {"shape": asdict(shape), "completions": arguments.completions, "completion_tokens": COMPLETION_TOKENS}
    with tempfile.TemporaryDirectory() as directory:
        model = shape.build(torch.float32, torch.device("cpu"))
        record["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(Path(directory) / "model")
        characters().save_pretrained(Path(directory) / "model")
        del model
        record["cells"] = {
            case: measure_apart(measure, case, Path(directory), arguments.completions, arguments.device)
            for case in CASES
        }
    path = write_record(record, arguments.output)
    print_table(record, console)
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
