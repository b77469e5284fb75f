"""An engine that loaded new weights, compared with one that started from them.

This is tried with CUDA graphs, and after sleep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trl_qurl.lab.doctor.report import Line, Status
from trl_qurl.lab.doctor.trial import build_trainer, train

if TYPE_CHECKING:
    from vllm import LLM

PROMPTS = [[token] * 8 for token in range(1, 9)]
STEPS = 8
LIKELIEST = 20  # tokens to compare per step: vLLM's default `max_logprobs`
LIMIT = 0.05  # nats. Rounding explains a hundredth; a graph that reads old memory, whole nats


def check(form: str, name: str) -> list[Line]:
    """Train, load the last weights, and compare answers.

    For the trial `"sleep"`, the engine sleeps between rollouts.
    """
    # Without smoothing, both engines hold what follows from the weights alone.
    sleeps = name == "sleep"
    trainer = build_trainer(form, smooth_activations=False, vllm_enable_sleep_mode=sleeps)
    train(trainer)
    trainer.vllm_generation.sync_weights()
    reloaded = trainer.vllm_generation.llm
    if sleeps:
        reloaded.wake_up(tags=["kv_cache"])  # as TRL does before it generates
    new = build_trainer(form, trainer.model, smooth_activations=False).vllm_generation.llm
    distance = largest_difference(continue_greedily(reloaded), continue_greedily(new))
    engine_config = reloaded.llm_engine.vllm_config
    mode = engine_config.compilation_config.cudagraph_mode.name
    text = (
        f"a reloaded and a new engine differ by {distance:.1e} nats in a log-probability (CUDA "
        f"graphs: {mode})"
    )
    if not distance <= LIMIT:
        raise RuntimeError(f"{text}: the reloaded one reads memory with other weights")
    status = Status.NOTE if mode == "NONE" else Status.OK
    return [Line(name, text, status, data={"distance": distance, "cuda_graphs": mode})]


class Continuation(NamedTuple):
    """A greedy continuation of a prompt."""

    tokens: list[int]
    logps: list[dict[int, float]]  # of the likeliest tokens, in nats, for each token


def continue_greedily(llm: LLM) -> list[Continuation]:
    """Continue each of `PROMPTS` with its likeliest tokens, past end tokens."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=STEPS, temperature=0.0, logprobs=LIKELIEST, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    continuations = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        [completion] = output.outputs
        logps = []
        for likeliest in completion.logprobs:
            logps.append({token: entry.logprob for token, entry in likeliest.items()})
        continuations.append(Continuation(list(completion.token_ids), logps))
    return continuations


def largest_difference(first: list[Continuation], second: list[Continuation]) -> float:
    """Return the largest difference in a likely token's log-probability, in nats.

    Steps count while the continuations agree.
    """
    differences = [0.0]
    for one, other in zip(first, second, strict=True):
        for step, (ours, theirs) in enumerate(zip(one.logps, other.logps, strict=True)):
            if one.tokens[:step] != other.tokens[:step]:
                break
            common = ours.keys() & theirs.keys()
            differences += [abs(ours[token] - theirs[token]) for token in common]
    return float(np.max(differences))  # unlike Python's, NaN if one is
