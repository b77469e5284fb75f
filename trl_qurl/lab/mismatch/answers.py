"""Answers sampled from an engine, and scored under the full-precision policy."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from trl_qurl.quantization.plan import Formats, schemes_of
from trl_qurl.rollout.engine.hardware import kernel_environment


@dataclass(frozen=True)
class Job:
    """Prompts for one engine to answer."""

    model: str  # directory of the checkpoint that vLLM loads
    formats: Formats  # of the checkpoint, `"none"` for 16 bits
    prompts: list[list[int]]  # token ids of each prompt, repeated once per answer
    max_tokens: int  # longest answer
    engine_kwargs: dict[str, Any] = field(default_factory=dict)  # for `vllm.LLM`


class Answer(NamedTuple):
    """An answer of `T` tokens."""

    prompt: list[int]
    tokens: list[int]  # (T,)
    logps: list[float]  # log-probabilities of the tokens under the engine, in nats, (T,)
    likeliest: list[int]  # the engine's most likely token at each step, (T,)


class Scored(NamedTuple):
    """One answer of `T` tokens under both policies."""

    behavior_logps: torch.Tensor  # under the engine, in nats, (T,)
    proximal_logps: torch.Tensor  # under the full-precision policy, in nats, (T,)
    agrees: torch.Tensor  # whether both have the same most likely token, bool, (T,)
    question: tuple[int, ...]  # prompt tokens


def sample(job: Job) -> list[Answer]:
    """Sample an answer to each prompt at temperature 1 from the whole vocabulary, as training does by default."""
    from vllm import LLM, SamplingParams

    os.environ.update(kernel_environment(*schemes_of(job.formats)))
    llm = LLM(**{"model": job.model, "seed": 0, "logprobs_mode": "processed_logprobs", **job.engine_kwargs})
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


def score(model: Any, answers: Iterable[Answer]) -> Iterator[Scored]:
    """Score each answer with one forward pass over its prompt and its tokens.

    Answers are not batched: padding would make a row depend on its neighbors, adding to the effect being measured.
    """
    for answer in answers:
        count = len(answer.tokens)
        if count == 0:
            continue
        tokens = torch.tensor([answer.prompt + answer.tokens], device=model.device)  # (1, P + T)
        with torch.inference_mode():
            logits = model(input_ids=tokens, logits_to_keep=count + 1).logits[0, :-1].float()  # (T, V)
        logps = logits.log_softmax(-1)
        chosen = logps.gather(-1, tokens[0, -count:, None]).squeeze(-1).cpu()
        likeliest = logits.argmax(-1).cpu()
        agrees = likeliest == torch.tensor(answer.likeliest)
        yield Scored(torch.tensor(answer.logps), chosen, agrees, tuple(answer.prompt))
