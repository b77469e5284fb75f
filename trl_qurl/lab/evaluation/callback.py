"""Benchmarks during training, answered greedily by the engine, graded, and logged as `eval_*`.

The evaluation of TRL's trainers samples at the training temperature, one small batch after the
other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accelerate.utils import gather_object
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from trl_qurl.lab.evaluation.tasks import Task, are_correct, encode_prompt, load_tasks
from trl_qurl.trainers.callbacks import RolloutCallback

if TYPE_CHECKING:
    from trl_qurl.rollout.backend import QuantizedVLLMGeneration


ENDS = ("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos")
"""Names in `generation_kwargs` that decide where a completion ends."""


class TaskEvaluationCallback(RolloutCallback):
    """Callback that runs benchmarks before the first optimizer step and every N steps.

    Pass it in `callbacks=[...]`. The actor answers: the quantized copy of the policy in the engine.
    Logs `eval_<task>/actor_avg@1`, `..._tokens` (mean length) and `..._finished` (share of answers
    that ended before the token limit), and `eval_<task>/seconds`.

    Args:
        tasks: Benchmarks as for `trl-qurl eval`: `gsm8k`, `math500`, ..., a local file,
            `name=source`.
        every: Optimizer steps between evaluations. Multiples of the updates per rollout avoid an
            extra sync.
        limit: Use only the first N questions of each benchmark.

    Raises:
        ValueError: If a number is not positive, or a benchmark does not exist.
        FileNotFoundError: If a file does not exist.
    """

    def __init__(
        self, tasks: str | Sequence[str], every: int = 100, limit: int | None = None
    ) -> None:
        if every < 1:
            raise ValueError(
                f"every is {every}: give a positive number of optimizer steps between evaluations."
            )
        self._tasks = load_tasks([tasks] if isinstance(tasks, str) else list(tasks), limit)
        self._every = every

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Evaluate the initial policy, unless training resumes."""
        trainer = self.trainer
        if state.global_step == 0:
            self._evaluate(trainer)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Evaluate every N steps."""
        if state.global_step % self._every == 0:
            should_log = control.should_log
            self._evaluate(self.trainer)
            # Logging our row cleared it, but this step's row is still due.
            control.should_log = should_log

    def _evaluate(self, trainer: Trainer) -> None:
        for task in self._tasks:
            started = time.perf_counter()
            metrics = evaluate_task(trainer, task)
            metrics[f"eval_{task.name}/seconds"] = time.perf_counter() - started
            # Bypass TRL's `log`, which would flush the metrics of the current rollout.
            Trainer.log(trainer, metrics)


def evaluate_task(trainer: Trainer, task: Task) -> dict[str, float]:
    """Answer all questions of a task, split across processes, and compute metrics.

    Every process must call this.
    """
    accelerator = trainer.accelerator
    count = len(task.prompts)
    share = math.ceil(count / accelerator.num_processes)
    first = accelerator.process_index * share
    # A server requires the same number of prompts from each process, so pad with the last question.
    indices = [min(index, count - 1) for index in range(first, first + share)]
    # As in the trainer's `_tokenize_prompts`; RLOO has neither tools nor a template of its own.
    template = {name: getattr(trainer, name, None) or None for name in ("chat_template", "tools")}
    template |= trainer.chat_template_kwargs
    prompts = [
        encode_prompt(trainer._tokenizer, task.prompts[index], **template) for index in indices
    ]
    completions = complete_greedily(trainer.vllm_generation, prompts)
    texts = trainer.processing_class.batch_decode(completions, skip_special_tokens=True)
    correct = are_correct(texts, [task.solutions[index] for index in indices])
    lengths = [len(tokens) for tokens in completions]
    finished = [bool(tokens) and tokens[-1] in trainer.eos_token_ids for tokens in completions]
    rows = gather_object(list(zip(correct, lengths, finished, strict=True)))[:count]
    columns = zip(*rows, strict=True)
    return {
        f"eval_{task.name}/actor_{metric}": sum(column) / count
        for metric, column in zip(("avg@1", "tokens", "finished"), columns, strict=True)
    }


def complete_greedily(
    generation: QuantizedVLLMGeneration, prompts: list[list[int]]
) -> list[list[int]]:
    """Generate one greedy completion per prompt from the policy as it is now.

    Training's other sampling options are left out, in `generation_kwargs` all but those that end a
    completion.
    """
    own = generation.__dict__
    given = own.get("generation_kwargs") or {}
    ends = {name: given[name] for name in ENDS if name in given}
    greedy = {
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "structured_outputs_regex": None,
        "generation_kwargs": ends,
    }
    previous = {name: own[name] for name in own.keys() & greedy}
    own.update(greedy)
    try:
        completions = generation.generate(prompts=prompts, images=None, num_generations=1)[1]
    finally:
        own.update(previous)
    return [list(completion) for completion in completions]
