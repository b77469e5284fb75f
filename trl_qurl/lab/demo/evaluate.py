"""The accuracy of the policy, exactly and without sampling noise, and that of the quantized actor.

The answer has one length, so one teacher-forced pass gives both the probability of sampling it and whether greedy
decoding finds it: the greedy tokens equal the answer exactly where every answer token is the most likely one.
`B` problems, `P` prompt tokens, `A` answer tokens, `V` vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trl_qurl.lab.demo.task import PROMPT_TOKENS

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from trl_qurl.rollout.backend import QuantizedVLLMGeneration


class Accuracy(NamedTuple):
    """Shares of problems in [0, 1]."""

    expected: float  # mean probability of sampling exactly the answer at temperature 1
    greedy: float  # share of problems that greedy decoding answers exactly


def score_answers(answer_logits: Tensor, answer_ids: Tensor) -> Accuracy:
    r"""Accuracy of teacher-forced answers (B, A), from the logits (B, A, V) that predict them; the expected one is

    $$\frac{1}{B} \sum_b \exp \sum_a \log \pi(y_{b,a} \mid x_b, y_{b,<a})$$
    """
    logps = answer_logits.float().log_softmax(-1).gather(-1, answer_ids.unsqueeze(-1)).squeeze(-1)  # (B, A)
    found = (answer_logits.argmax(-1) == answer_ids).all(-1)  # (B,)
    return Accuracy(expected=logps.sum(-1).exp().mean().item(), greedy=found.float().mean().item())


def measure_policy(model: PreTrainedModel, problem_ids: Tensor) -> Accuracy:
    """Accuracy of the full-precision policy on encoded problems, shape (B, P + A); the model's mode is put back."""
    import torch

    ids = problem_ids.to(model.device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits  # (B, P + A, V)
    model.train(was_training)
    return score_answers(logits[:, PROMPT_TOKENS - 1 : -1], ids[:, PROMPT_TOKENS:])


def measure_actor(generation: QuantizedVLLMGeneration, problem_ids: Tensor) -> float:
    """Greedy accuracy of the actor that makes the rollouts, as the engine runs it, after a sync of the weights."""
    prompts, answers = problem_ids[:, :PROMPT_TOKENS].tolist(), problem_ids[:, PROMPT_TOKENS:].tolist()
    completions = complete_greedily(generation, prompts)
    return sum(list(given) == right for given, right in zip(completions, answers, strict=True)) / len(answers)


def complete_greedily(generation: QuantizedVLLMGeneration, prompts: list[list[int]]) -> list[list[int]]:
    """One completion of each prompt by the engine, after a sync of the weights."""
    generation.sync_weights()
    temperature, generation.temperature = generation.temperature, 0.0
    try:
        completions: list[list[int]] = generation.generate(prompts=prompts, images=None, num_generations=1)[1]
    finally:
        generation.temperature = temperature
        generation.pop_cost()  # else the row of the next rollout would count this one's seconds and tokens
    return completions
