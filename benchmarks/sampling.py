"""What sampling settings that cut tokens do to the importance ratio, and what following them costs.

    python -m benchmarks.sampling MODEL OUTPUT.json

MODEL is a chat model; its own completions to the questions of a task, with INT8 rollouts, are
scored over the whole vocabulary and over the tokens that the engine lists.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

CUTS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "top_k=5": {"top_k": 5},
    "top_p=0.95, top_k=20": {"top_p": 0.95, "top_k": 20},
    "top_p=0.9": {"top_p": 0.9},
    "top_p=0.95": {"top_p": 0.95},
    "min_p=0.05": {"min_p": 0.05},
}
OFF = {"top_k": 0, "top_p": 1.0, "min_p": None}
ROUNDS = 4  # of 32 completions
TOKENS = 64


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from benchmarks.provenance import provenance

    trainer, rows = build(args.model)
    results = {name: measure(trainer, rows, cuts) for name, cuts in CUTS.items()}
    costs = {f"listed {count}": cost(trainer, rows, count) for count in (0, 20, 64)}
    found = provenance(torch.device("cpu"), measured="trl_qurl")
    record = {"benchmark": "sampling", **found, "model": Path(args.model).name}
    record |= {"tokens": ROUNDS * 32 * TOKENS, "results": results, "generation_s": costs}
    args.output.write_text(json.dumps(record, indent=2) + "\n")
    os._exit(0)


def build(model: str) -> tuple[Any, list[dict[str, Any]]]:
    """Return a trainer that lists as many tokens as any setting needs, and rows of a rollout."""
    from datasets import Dataset

    from benchmarks.chat_tasks import TASKS
    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer
    from trl_qurl.lab.device import cpu_settings

    prompts = [prompt for prompt, _ in TASKS["facts"].learned]
    config = QuRLGRPOConfig(
        tempfile.mkdtemp(),
        num_generations=8,
        steps_per_generation=4,
        per_device_train_batch_size=8,
        max_completion_length=TOKENS,
        vllm_max_model_length=256,
        top_p=0.9,
        model_init_kwargs={"dtype": "float32"},
        vllm_engine_kwargs={"enforce_eager": True, "use_tqdm_on_load": False},
        report_to="none",
        **cpu_settings(),
    )
    trainer = QuRLGRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [
            float(i % 2) for i, _ in enumerate(completions)
        ],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )
    trainer.model.train()
    return trainer, [{"prompt": prompt} for prompt in prompts[:4] for _ in range(8)]


def measure(trainer: Any, rows: list[dict[str, Any]], cuts: dict[str, Any]) -> dict[str, float]:
    """Return figures of a rollout, over the listed tokens and over all."""
    for name, value in {**OFF, **cuts}.items():
        setattr(trainer.vllm_generation, name, value)
    follows = bool(cuts)
    trainer._listed_count = 64 if follows else 0
    ours, whole, kept, unlisted = [], [], [], []
    for _ in range(ROUNDS):
        batch = trainer._generate_and_score_completions(rows)
        learned = batch["completion_mask"].bool()
        behavior = batch["sampling_per_token_logps"]
        ours.append((batch["old_per_token_logps"] - behavior)[learned])
        whole.append((over_all_tokens(trainer, batch) - behavior)[learned])
        if follows:
            kept.append((batch["listed_ids"] >= 0).sum(-1)[learned].float())
            unlisted.append(-batch["listed_log_mass"][learned].expm1())
    found = {}
    for name, parts in (("followed", ours), ("whole vocabulary", whole)):
        ratio = torch.cat(parts).exp()
        found |= {
            f"{name}: mean ratio": ratio.mean().item(),
            f"{name}: its standard error": (ratio.std() / len(ratio) ** 0.5).item(),
            f"{name}: kl_k3": (ratio - 1 - ratio.log()).mean().item(),
            f"{name}: share beyond 10 %": ((ratio - 1).abs() > 0.1).float().mean().item(),
        }
    if follows:
        found |= {
            "listed tokens": torch.cat(kept).mean().item(),
            "unlisted mass": torch.cat(unlisted).mean().item(),
        }
    print(cuts, found, flush=True)
    return found


@torch.no_grad()
def over_all_tokens(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the policy's log-probabilities over the whole vocabulary, (B, T)."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    trainer.model.eval()
    length = batch["completion_ids"].size(1)
    logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, 8)[0]
    trainer.model.train()
    return logps


def cost(trainer: Any, rows: list[dict[str, Any]], count: int) -> float:
    """Return the median of five generations, in seconds, with so many tokens listed."""
    generation = trainer.vllm_generation
    for name, value in {**OFF, **CUTS["top_p=0.95, top_k=20"]}.items():
        setattr(generation, name, value)
    generation.logprobs = trainer._listed_count = count
    seconds = []
    for _ in range(5):
        generation.cost.take()
        trainer._generate_and_score_completions(rows)
        seconds.append(generation.cost.take().generate_s)
    print(count, seconds, flush=True)
    return median(seconds)


if __name__ == "__main__":
    sys.exit(main())
