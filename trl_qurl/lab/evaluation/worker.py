"""Start an engine in a separate process, answer all questions and grade the answers.

    python -m trl_qurl.lab.evaluation.worker JOB

An engine's memory is freed only when its process ends, and each format needs an engine.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_qurl.cli.noise import quiet, shows_everything
from trl_qurl.lab.evaluation.results import Answer
from trl_qurl.lab.evaluation.tasks import Task, are_correct, encode_prompt, needed_context
from trl_qurl.lab.processes import die_with_parent

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Job:
    """Evaluation of one checkpoint."""

    label: str  # number format, for messages
    model: str  # directory of the checkpoint that vLLM loads
    tasks: list[Task]
    sampling: dict[str, Any]  # arguments for `vllm.SamplingParams`, except the seed
    seed: int  # each question derives a separate seed from it, so its answers do not depend on other questions
    answers: Path  # file for the answers, written when all are graded
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # for `vllm.LLM`


def write_answers(job: Job) -> None:
    """Answer and grade all questions, then write the answer file; a file that exists is complete."""
    from vllm import SamplingParams

    SamplingParams(**job.sampling)  # refuses values that make no sense before an engine starts
    print(f"Starting vLLM with {job.label}", flush=True)
    token_ids, llm = start_engine(job)
    answers = [answer for task in job.tasks for answer in answer_task(llm, task, token_ids[task.name], job)]
    tmp = job.answers.with_suffix(".tmp")
    tmp.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers), encoding="utf-8")
    os.replace(tmp, job.answers)


def start_engine(job: Job) -> tuple[dict[str, list[list[int]]], LLM]:
    """Return the token ids of all prompts, by task, and an engine with a long enough context."""
    from transformers import AutoConfig, AutoTokenizer

    from trl_qurl.rollout.engine.hardware import check_cpu_build, cpu_cache_arguments

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    token_ids = {task.name: [encode_prompt(tokenizer, prompt) for prompt in task.prompts] for task in job.tasks}
    config = AutoConfig.from_pretrained(job.model)
    check_cpu_build(config)
    needed = needed_context(config, chain(*token_ids.values()), job.sampling["max_tokens"])
    memory = cpu_cache_arguments(job.model, job.engine_kwargs)
    from vllm import LLM

    return token_ids, LLM(**{"model": job.model, "max_model_len": needed, **memory, **job.engine_kwargs})


def answer_task(llm: LLM, task: Task, prompts: list[list[int]], job: Job) -> Iterator[Answer]:
    """Generate the answers to a task with vLLM's progress bar, and yield them graded, by question."""
    from vllm import SamplingParams

    print(f"{job.label}: {task.name}, {len(prompts)} questions", flush=True)
    # Unlike Python's hash, a checksum is the same on every machine.
    seeds = [zlib.crc32(f"{job.seed}/{task.name}/{question}".encode()) for question in range(len(prompts))]
    params = [SamplingParams(**job.sampling, seed=seed) for seed in seeds]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for question, (output, solution) in enumerate(zip(outputs, task.solutions, strict=True)):
        graded = are_correct([completion.text for completion in output.outputs], [solution] * len(output.outputs))
        for completion, correct in zip(output.outputs, graded, strict=True):
            finished = completion.finish_reason == "stop"
            yield Answer(task.name, question, correct, len(completion.token_ids), finished, completion.text)


if __name__ == "__main__":
    die_with_parent()
    quiet()
    try:
        write_answers(pickle.loads(Path(sys.argv[1]).read_bytes()))
    except (ValueError, OSError) as error:  # errors that a user can fix, as in `trl_qurl.cli.main`
        if shows_everything():
            raise
        sys.exit(f"trl-qurl: error: {' '.join(str(error).split())}")
