"""The demo on the user's chat model: GRPO on one-digit arithmetic, answers before and after."""

from __future__ import annotations

import re
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_qurl.lab.comparison import new_table
from trl_qurl.lab.demo.algorithms import UPDATES_PER_ROLLOUT, shared_settings
from trl_qurl.lab.device import keep_freed_memory

if TYPE_CHECKING:
    from rich.console import Console

    from trl_qurl import QuRLGRPOConfig, QuRLGRPOTrainer

OPERATIONS = {"times": int.__mul__, "plus": int.__add__}
COMPLETIONS = 32
LONGEST_ANSWER = 16  # tokens


class Question(NamedTuple):
    """A question and its answer."""

    text: str
    answer: int


def questions(held_out: bool) -> list[Question]:
    """Return the 32 held-out questions or the other 96, with digits from 2 to 9."""
    selected = []
    for name, operation in OPERATIONS.items():
        for a, b in product(range(2, 10), repeat=2):
            is_held_out = (a + 3 * b) % 4 == 0
            if is_held_out == held_out:
                selected.append(Question(f"What is {a} {name} {b}?", operation(a, b)))
    return selected


def conversation(question: Question) -> list[dict[str, str]]:
    """Turn a question into a conversation."""
    return [{"role": "user", "content": f"{question.text} Reply with the number only."}]


def is_right(text: str, answer: int) -> bool:
    """Check whether the last number in a completion is the answer."""
    return re.findall(r"\d+", text)[-1:] == [str(answer)]


def right_number(completions: list[Any], answer: list[int], **kwargs: Any) -> list[float]:
    """Reward function: 1 if the last number is correct, else 0."""
    return [
        float(is_right(turns[0]["content"], right))
        for turns, right in zip(completions, answer, strict=True)
    ]


def build_chat_config(
    scheme: str | None, output_dir: Path, rollouts: int, seed: int, **changed: Any
) -> QuRLGRPOConfig:
    """Build the settings: four updates per rollout of 32 completions.

    `changed` overrides settings, for studies.
    """
    from trl_qurl import QuRLGRPOConfig
    from trl_qurl.lab.device import cpu_settings

    settings: dict[str, Any] = {
        **shared_settings(scheme, output_dir, rollouts, seed),
        "per_device_train_batch_size": COMPLETIONS // UPDATES_PER_ROLLOUT,
        "max_completion_length": LONGEST_ANSWER,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "model_init_kwargs": {"dtype": "float32"},
        **cpu_settings(),
        "vllm_max_model_length": 128,
        "vllm_engine_kwargs": {"enforce_eager": True, "use_tqdm_on_load": False},
    }
    return QuRLGRPOConfig(**{**settings, **changed})


def build_chat_trainer(model: str, config: QuRLGRPOConfig) -> QuRLGRPOTrainer:
    """Build the trainer, with its engine started, on the questions outside the held-out split."""
    from datasets import Dataset

    from trl_qurl import QuRLGRPOTrainer

    training = questions(held_out=False)
    prompts = [conversation(question) for question in training]
    answers = [question.answer for question in training]
    data = Dataset.from_dict({"prompt": prompts, "answer": answers})
    return QuRLGRPOTrainer(model=model, reward_funcs=right_number, args=config, train_dataset=data)


def answer_greedily(trainer: QuRLGRPOTrainer) -> list[str]:
    """Answer the held-out questions with the rollout actor in the engine."""
    from trl_qurl.lab.evaluation.callback import complete_greedily
    from trl_qurl.lab.evaluation.tasks import encode_prompt

    tokenizer = trainer.processing_class
    held_out = questions(held_out=True)
    prompts = [encode_prompt(tokenizer, conversation(question)) for question in held_out]
    trainer.vllm_generation.sync_weights()
    completions = complete_greedily(trainer.vllm_generation, prompts)
    return tokenizer.batch_decode(completions, skip_special_tokens=True)


def accuracy(texts: list[str]) -> float:
    """Return the share of right answers to the held-out questions."""
    answers = [question.answer for question in questions(held_out=True)]
    right = [is_right(text, answer) for text, answer in zip(texts, answers, strict=True)]
    return sum(right) / len(right)


def run_chat_demo(
    model: str, scheme: str | None, output_dir: Path, rollouts: int, seed: int
) -> str | None:
    """Train, print answers from before and after, and write `run.jsonl` to `output_dir`.

    The arguments are the options of `trl-qurl demo`. Returns why the demo failed, or `None`.
    """
    keep_freed_memory()
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from trl_qurl.lab.live import live_line
    from trl_qurl.lab.progress import use_step_lines
    from trl_qurl.lab.runs import read_run
    from trl_qurl.trainers.run_log import RUN_LOG, append_row

    # Hide advice about the tokenizer, which the user did not choose.
    transformers_logging.set_verbosity_error()
    console = Console()
    config = build_chat_config(scheme, output_dir, rollouts, seed)
    name = scheme.upper() if scheme else "BF16"
    console.print(f"Loading {model} and starting vLLM with {name} rollouts")
    trainer = build_chat_trainer(model, config)
    before = answer_greedily(trainer)
    started = time.perf_counter()
    use_step_lines(trainer)
    with live_line(trainer):
        trainer.train()
    minutes = (time.perf_counter() - started) / 60
    after = answer_greedily(trainer)
    print_answers(before, after, console)
    first = accuracy(before)
    last = accuracy(after)
    for step, share in ((0, first), (config.max_steps, last)):  # for the picture
        row = {"step": step, "held_out_accuracy": share, "held_out_answers": len(after)}
        append_row(output_dir / RUN_LOG, row)
    kl = [value for _, value in read_run(output_dir).series("mismatch/kl_k3")]
    console.print(
        f"Greedy answers to 32 held-out questions: {first:.2f} before, {last:.2f} after {rollouts} "
        f"rollouts in {minutes:.1f} minutes.\nKL between engine and policy: {kl[0]:.2g} nats per "
        f"token at the start, {kl[-1]:.2g} at the end."
    )
    if last > first:
        return None
    return f"accuracy went from {first:.2f} to {last:.2f}."


def print_answers(before: list[str], after: list[str], console: Console, count: int = 6) -> None:
    """Print some questions with their answers before and after training."""
    table = new_table("", "", ("question", "before", "after"), ())
    held_out = questions(held_out=True)
    for index in range(0, len(held_out), len(held_out) // count):
        old = " ".join(before[index].split())
        new = " ".join(after[index].split())
        table.add_row(held_out[index].text, old, new)
    console.print(table)
