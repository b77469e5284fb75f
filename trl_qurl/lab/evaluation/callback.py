"""Benchmarks during training, answered greedily by the engine or the policy, graded, and logged as `eval_*`."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers import Trainer, TrainerControl, TrainerState
from trl.models import unwrap_model_for_generation

from trl_qurl.lab.evaluation.tasks import Task, encode_prompt, load_tasks
from trl_qurl.rewards import is_correct
from trl_qurl.trainers.callbacks import TrainerAwareCallback

if TYPE_CHECKING:
    from trl_qurl.trainers.rollouts import QuantizedRolloutsMixin

logger = logging.getLogger(__name__)

TokenIds = list[list[int]]


class TaskEvaluationCallback(TrainerAwareCallback):
    """Callback that runs benchmarks before the first optimizer step and every N steps; pass it in `callbacks=[...]`.

    Logs `eval_<task>/<who>_avg@1`, `..._tokens` (mean length) and `..._finished` (share of answers that ended before
    the token limit), and `eval_<task>/seconds`, where who is `actor` or `policy`.

    Args:
        tasks: Benchmarks as for `trl-qurl eval`: `gsm8k`, `math500`, ..., a local file, `name=source`.
        every: Optimizer steps between evaluations. Multiples of the updates per rollout avoid an extra sync.
        limit: Use only the first N questions of each benchmark.
        who: Model that answers. `"actor"` is the quantized copy in the engine: fast, but measures only that copy.
            `"policy"` is the model in training, which generates without vLLM: slow, but it is the model you train.

    Raises:
        ValueError: If a number is not positive, or `who` or a benchmark does not exist.
        FileNotFoundError: If a file does not exist.
    """

    def __init__(
        self, tasks: str | Sequence[str], every: int = 100, limit: int | None = None, who: str = "actor"
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}: give a positive number of optimizer steps between evaluations.")
        if who not in ANSWERERS:
            raise ValueError(f"who is {who!r}, but must be one of {', '.join(map(repr, ANSWERERS))}.")
        self._tasks = load_tasks([tasks] if isinstance(tasks, str) else list(tasks), limit)
        self._every = every
        self._who = who

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluate the initial policy, unless training resumes."""
        trainer = self.trainer
        if self._who == "policy" and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            raise ValueError("who='policy' requires the whole model in one process: use 'actor', or `trl-qurl eval`.")
        if state.global_step == 0:
            self._evaluate()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluate every N steps."""
        if state.global_step % self._every == 0:
            should_log = control.should_log
            self._evaluate()
            control.should_log = should_log  # logging our row cleared it, but this step's row is still due

    def _evaluate(self) -> None:
        trainer = self.trainer
        for task in self._tasks:
            if trainer.accelerator.is_main_process:
                logger.info("Answering the %s questions of %s (%s).", len(task.prompts), task.name, self._who)
            started = time.perf_counter()
            metrics = evaluate_task(trainer, task, self._who)
            metrics[f"eval_{task.name}/seconds"] = time.perf_counter() - started
            # Bypass TRL's `log`, which would flush the metrics of the current rollout.
            Trainer.log(trainer, metrics)


def evaluate_task(trainer: "QuantizedRolloutsMixin", task: Task, who: str) -> dict[str, float]:
    """Answer all questions of a task, split across processes, and compute metrics; every process must call this."""
    accelerator = trainer.accelerator
    share = -(-len(task.prompts) // accelerator.num_processes)
    first = accelerator.process_index * share
    # A server requires the same number of prompts from each process, so pad with the last question.
    indices = [min(index, len(task.prompts) - 1) for index in range(first, first + share)]
    prompts = [encode_prompt(trainer._tokenizer, task.prompts[index]) for index in indices]
    completions = ANSWERERS[who](trainer, prompts)
    texts = trainer.processing_class.batch_decode(completions, skip_special_tokens=True)
    rows = [
        (is_correct(text, task.answers[index]), len(tokens), bool(tokens) and tokens[-1] in trainer.eos_token_ids)
        for index, text, tokens in zip(indices, texts, completions, strict=True)
    ]
    rows = gather_object(rows)[: len(task.prompts)]
    return {
        f"eval_{task.name}/{who}_{metric}": sum(column) / len(rows)
        for metric, column in zip(("avg@1", "tokens", "finished"), zip(*rows, strict=True), strict=True)
    }


def answer_by_actor(trainer: "QuantizedRolloutsMixin", prompts: TokenIds) -> TokenIds:
    """Generate greedy completions with the engine, syncing the weights of this step first if needed."""
    generation = trainer.vllm_generation
    if trainer.state.global_step != trainer._last_loaded_step:
        generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step
    temperature, generation.temperature = generation.temperature, 0.0
    try:
        completions = generation.generate(prompts=prompts, images=None, num_generations=1)[1]
    finally:
        generation.temperature = temperature
    generation.pop_cost()  # discard: this was not a rollout
    return [list(completion) for completion in completions]


def answer_by_policy(trainer: "QuantizedRolloutsMixin", prompts: TokenIds) -> TokenIds:
    """Generate greedy completions with the model in training."""
    tokenizer, size = trainer._tokenizer, trainer.args.per_device_eval_batch_size
    completions: TokenIds = []
    was_training = trainer.model.training
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad():
        model.eval()
        for start in range(0, len(prompts), size):
            batch = {"input_ids": prompts[start : start + size]}
            batch = tokenizer.pad(batch, padding_side="left", return_tensors="pt").to(model.device)  # (B, P)
            output = model.generate(
                **batch,
                max_new_tokens=trainer.args.max_completion_length,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=list(trainer.eos_token_ids),
            )
            generated = output[:, batch["input_ids"].shape[1] :].tolist()
            completions += [_until_end(tokens, trainer.eos_token_ids) for tokens in generated]
    trainer.model.train(was_training)
    return completions


def _until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Cut after the first end token, which stays included as in vLLM."""
    ends = [index for index, token in enumerate(tokens) if token in eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


ANSWERERS: dict[str, Callable[["QuantizedRolloutsMixin", TokenIds], TokenIds]] = {
    "actor": answer_by_actor,
    "policy": answer_by_policy,
}
