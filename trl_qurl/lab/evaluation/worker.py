"""Start an engine in a separate process, answer all questions and grade the answers."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.evaluation.results import Answer
from trl_qurl.lab.evaluation.tasks import Task, are_correct, encode_prompt, needed_context
from trl_qurl.lab.grading import is_text
from trl_qurl.lab.processes import call_in_child
from trl_qurl.rollout.wire import COMPILING

if TYPE_CHECKING:
    from vllm import LLM


AT_ONCE = 256  # answers that vLLM generates at a time by default


@dataclass(frozen=True)
class Job:
    """Evaluation of one checkpoint."""

    label: str  # number format, for messages
    model: str  # directory of the checkpoint that vLLM loads
    tasks: list[Task]
    sampling: dict[str, Any]  # arguments for `vllm.SamplingParams`, except the seed
    # each question derives a separate seed from it, so its answers do not depend on other questions
    seed: int
    environment: dict[str, str]  # that the engine of this format needs
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # for `vllm.LLM`
    template: dict[str, Any] = field(default_factory=dict)  # for the chat template


def answer_once(job: Job, path: Path) -> list[Answer]:
    """Return a format's answers, generated in a separate process unless the answer file exists."""
    if not path.exists():
        failure = (
            f"Evaluation with {job.label} failed; see the output above. Run the same command again "
            "to continue with this format."
        )
        answers = call_in_child(answer, job, failure, shows_output=True)
        lines = [json.dumps(asdict(graded)) + "\n" for graded in answers]
        tmp = path.with_suffix(".tmp")
        tmp.write_text("".join(lines), encoding="utf-8")
        tmp.replace(path)
    stored = path.read_text(encoding="utf-8").splitlines()
    return [Answer(**json.loads(line)) for line in stored]


def answer(job: Job) -> list[Answer]:
    """Answer and grade all questions."""
    os.environ.update(job.environment)
    from vllm import SamplingParams

    SamplingParams(**job.sampling)  # refuses values that make no sense before an engine starts
    token_ids, llm = start_engine(job)
    answers: list[Answer] = []
    for task in job.tasks:
        answers += answer_task(llm, task, token_ids[task.name], job)
    return answers


def start_engine(job: Job) -> tuple[dict[str, list[list[int]]], LLM]:
    """Return the token ids of all prompts, by task, and an engine with a long enough context."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from trl_qurl.rollout.engine.hardware import WORTH_COMPILING, check_cpu_build
    from trl_qurl.rollout.repairs.cpu_memory import cpu_cache_arguments

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    encode = partial(encode_prompt, tokenizer, **job.template)
    token_ids = {task.name: list(map(encode, task.prompts)) for task in job.tasks}
    config = AutoConfig.from_pretrained(job.model)
    check_cpu_build(config)
    max_tokens = job.sampling["max_tokens"]
    needed = needed_context(config, chain(*token_ids.values()), max_tokens)
    answers = max(len(prompts) for prompts in token_ids.values()) * job.sampling.get("n", 1)
    arguments: dict[str, Any] = {"max_model_len": needed}
    if not torch.cuda.is_available():
        arguments["enforce_eager"] = answers * max_tokens < WORTH_COMPILING
        # After part of a prompt, vLLM rewinds a seeded generator, which on a CPU is impossible
        # (docs/upstream.md).
        arguments["enable_chunked_prefill"] = False
    arguments |= job.engine_kwargs
    sequences = min(answers, AT_ONCE)
    memory = cpu_cache_arguments(job.model, arguments, sequences=sequences, length=needed)
    from vllm import LLM

    compiling = "" if arguments.get("enforce_eager") else COMPILING
    print(f"Starting vLLM with {job.label}{compiling}", flush=True)
    return token_ids, LLM(**{"model": job.model, **memory, **arguments})


def answer_task(llm: LLM, task: Task, prompts: list[list[int]], job: Job) -> Iterator[Answer]:
    """Generate the answers to a task with vLLM's progress bar, and yield them graded."""
    from vllm import SamplingParams

    counts = f"{len(prompts)} questions, {sum(map(is_text, task.solutions))} compared as text"
    print(f"{job.label}: {task.name}, {counts}", flush=True)
    # Unlike Python's hash, a checksum is the same on every machine.
    seeds = [
        zlib.crc32(f"{job.seed}/{task.name}/{question}".encode())
        for question in range(len(prompts))
    ]
    params = [SamplingParams(**job.sampling, seed=seed) for seed in seeds]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for question, (output, solution) in enumerate(zip(outputs, task.solutions, strict=True)):
        completions = output.outputs
        texts = [completion.text for completion in completions]
        graded = are_correct(texts, [solution] * len(texts))
        for completion, correct in zip(completions, graded, strict=True):
            yield Answer(
                task.name,
                question,
                correct,
                tokens=len(completion.token_ids),
                finished=completion.finish_reason == "stop",
                text=completion.text,
            )
