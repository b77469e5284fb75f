"""Start an engine and sample answers, in a separate process.

    python -m trl_qurl.lab.mismatch.worker JOB RESULT

An engine's memory is freed only when its process ends, and each format needs an engine.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from trl_qurl.lab.mismatch.job import Answer, Job


def sample(job: Job) -> list[Answer]:
    """Sample an answer to each prompt at temperature 1 from the whole vocabulary, as training does by default."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=job.model, seed=job.seed, logprobs_mode="processed_logprobs", **job.engine_kwargs)
    params = SamplingParams(temperature=1.0, max_tokens=job.max_tokens, logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job.prompts], params, use_tqdm=False)
    answers = []
    for prompt, output in zip(job.prompts, outputs, strict=True):
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        logps = [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]
        likeliest = [max(step, key=lambda token: step[token].logprob) for step in completion.logprobs]  # noqa: B023
        answers.append(Answer(prompt, tokens, logps, likeliest))
    return answers


if __name__ == "__main__":
    source, result = map(Path, sys.argv[1:])
    result.write_bytes(pickle.dumps(sample(pickle.loads(source.read_bytes()))))
