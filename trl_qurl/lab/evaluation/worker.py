"""Start an engine in a separate process, answer all questions and grade the answers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.lab.comparison import write_json
from trl_qurl.lab.evaluation.results import Answers
from trl_qurl.lab.evaluation.tasks import Task, are_correct
from trl_qurl.lab.processes import call_in_child
from trl_qurl.quantization.plan import Formats, schemes_of
from trl_qurl.rollout.wire import COMPILING

if TYPE_CHECKING:
    from vllm import LLM


AT_ONCE = 256  # answers that vLLM generates at a time by default


@dataclass(frozen=True)
class Job:
    """Evaluation of one checkpoint."""

    label: str  # number format, for messages
    model: str  # directory of the checkpoint that vLLM loads
    formats: Formats  # of its layers
    tasks: list[Task]
    prompts: list[list[list[int]]]  # token ids, by task
    length: int  # tokens of the longest prompt and its answer
    sampling: dict[str, Any]  # arguments for `vllm.SamplingParams`, except the seed
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # for `vllm.LLM`


def answer_once(job: Job, path: Path) -> list[Answers]:
    """Return a format's answers, generated in a separate process unless the answer file exists."""
    if not path.exists():
        failure = (
            f"Evaluation with {job.label} failed; see the output above. Formats that are finished "
            "will not be repeated."
        )
        write_json(call_in_child(answer, job, failure, shows_output=True), path)
    stored = json.loads(path.read_text(encoding="utf-8"))
    return [Answers(**graded) for graded in stored]


def answer(job: Job) -> list[Answers]:
    """Answer and grade all questions."""
    llm = start(job)
    answers: list[Answers] = []
    for task, encoded in zip(job.tasks, job.prompts, strict=True):
        answers += answer_task(llm, task, encoded, job)
    return answers


def start(job: Job) -> LLM:
    """Start an engine with a context that is as long as the job's texts."""
    import torch

    from trl_qurl.lab.engine import start_engine
    from trl_qurl.rollout.checks.hardware import WORTH_COMPILING

    answers = max(map(len, job.prompts)) * job.sampling["n"]
    arguments: dict[str, Any] = {"model": job.model, "max_model_len": job.length}
    if not torch.cuda.is_available():
        arguments["enforce_eager"] = answers * job.sampling["max_tokens"] < WORTH_COMPILING
        # After part of a prompt, vLLM rewinds a seeded generator, which on a CPU is impossible
        # (docs/upstream.md).
        arguments["enable_chunked_prefill"] = False
    arguments |= job.engine_kwargs
    compiling = "" if arguments.get("enforce_eager") else COMPILING
    print(f"Starting vLLM with {job.label}{compiling}", flush=True)
    schemes = schemes_of(job.formats)
    return start_engine(schemes, arguments, min(answers, AT_ONCE), job.length)


def answer_task(llm: LLM, task: Task, prompts: list[list[int]], job: Job) -> Iterator[Answers]:
    """Generate the answers to a task with vLLM's progress bar, and yield them graded."""
    from vllm import SamplingParams

    print(f"{job.label}: {task.name}, {len(prompts)} questions", flush=True)
    params = []
    for question in range(len(prompts)):
        # Its own, so its answers do not depend on other questions; unlike Python's hash, a
        # checksum is the same on every machine.
        seed = zlib.crc32(f"{task.name}/{question}".encode())
        params.append(SamplingParams(**job.sampling, seed=seed))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for question, (output, solution) in enumerate(zip(outputs, task.solutions, strict=True)):
        completions = output.outputs
        texts = [completion.text for completion in completions]
        yield Answers(
            task.name,
            question,
            texts,
            are_correct(texts, [solution] * len(texts)),
            tokens=[len(completion.token_ids) for completion in completions],
            finished=[completion.finish_reason == "stop" for completion in completions],
        )
