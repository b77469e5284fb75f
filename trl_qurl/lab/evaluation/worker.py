"""Start an engine in a separate process, generate the missing answers and grade each as it finishes.

    python -m trl_qurl.lab.evaluation.worker JOB

An engine's memory is freed only when its process ends, and each format needs an engine.
"""

from __future__ import annotations

import pickle
import sys
import time
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from trl_qurl.cli.noise import quiet, shows_everything
from trl_qurl.lab.evaluation.answers import GREEDY, Answer, AnswerFile, Request
from trl_qurl.lab.evaluation.job import Job, Sampling
from trl_qurl.lab.evaluation.tasks import Task, encode_prompt, needed_context
from trl_qurl.lab.processes import die_with_parent

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


def answer_all(job: Job) -> None:
    """Generate, grade and save the missing answers, one task and mode at a time, with progress bars."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from trl_qurl.rewards import is_correct

    file = AnswerFile(job.answers)
    batches = [(task, mode, file.missing(requests)) for task, mode, requests in job.requests]
    console = Console()
    console.print(f"Starting vLLM with {job.label}")
    token_ids, llm = start_engine(job, [task for task, _, missing in batches if missing])
    right_column = TextColumn("right {task.fields[right]:.1%}")
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), right_column, TimeElapsedColumn()]
    with Progress(*columns, console=console) as progress:
        for task, mode, missing in batches:
            previous = file.of(task.name, mode)
            right, count = sum(answer.correct for answer in previous), len(previous)
            name, share = f"{job.label} {task.name} {mode}", right / count if count else 0.0
            bar = progress.add_task(name, total=count + len(missing), completed=count, right=share)
            last = time.monotonic()
            for request, text, tokens, finished in generate(llm, missing, token_ids.get(task.name, []), job.sampling):
                correct = is_correct(text, task.answers[request.question])
                now = time.monotonic()
                file.add(Answer(request, correct, tokens, finished, now - last, text))
                last, right, count = now, right + correct, count + 1
                progress.update(bar, completed=count, right=right / count)


def start_engine(job: Job, tasks: list[Task]) -> tuple[dict[str, list[list[int]]], LLM]:
    """Return the token ids of all prompts, by task, and an engine with a long enough context."""
    from transformers import AutoConfig, AutoTokenizer

    from trl_qurl.rollout.engine.colocated import check_head_size
    from trl_qurl.rollout.engine.cpu_memory import cpu_cache_arguments
    from trl_qurl.rollout.engine.launch import weight_bytes

    tokenizer = AutoTokenizer.from_pretrained(job.model)
    token_ids = {task.name: [encode_prompt(tokenizer, prompt) for prompt in task.prompts] for task in tasks}
    config = AutoConfig.from_pretrained(job.model)
    check_head_size(config)
    needed = needed_context(config, chain(*token_ids.values()), job.sampling.max_tokens)
    memory = cpu_cache_arguments(weight_bytes(Path(job.model)), job.engine_kwargs)
    from vllm import LLM

    return token_ids, LLM(**{"model": job.model, "max_model_len": needed, **memory, **job.engine_kwargs})


def generate(
    llm: LLM, requests: list[Request], prompts: list[list[int]], sampling: Sampling
) -> Iterator[tuple[Request, str, int, bool]]:
    """Yield each request with its text, number of tokens and whether it stopped before the limit, as they finish.

    All requests are queued at once, which keeps the engine full until the end. `LLM.generate` would return nothing
    until the last one is finished, so a killed process would lose all answers.
    """
    engine = llm.llm_engine
    for number, request in enumerate(requests):
        prompt = {"prompt_token_ids": prompts[request.question]}
        engine.add_request(str(number), prompt, sampling_params(request, sampling))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                (completion,) = output.outputs
                request = requests[int(output.request_id.split("-")[0])]
                yield request, completion.text, len(completion.token_ids), completion.finish_reason == "stop"


def sampling_params(request: Request, sampling: Sampling) -> SamplingParams:
    """Build vLLM's sampling parameters for one answer."""
    from vllm import SamplingParams

    if request.mode == GREEDY:
        return SamplingParams(temperature=0.0, max_tokens=sampling.max_tokens)
    name = f"{sampling.seed}/{request.task}/{request.question}/{request.sample}"
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=zlib.crc32(name.encode()),  # unlike Python's hash, the same on every machine
    )


if __name__ == "__main__":
    die_with_parent()
    quiet()
    try:
        answer_all(pickle.loads(Path(sys.argv[1]).read_bytes()))
    except (ValueError, OSError) as error:  # errors that a user can fix, as in `trl_qurl.cli.main`
        if shows_everything():
            raise
        sys.exit(f"trl-qurl: error: {' '.join(str(error).split())}")
