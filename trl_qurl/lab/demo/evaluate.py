"""Exact accuracy of the policy, without sampling noise, and greedy accuracy of the actor.

All answers have the same length, so one teacher-forced pass gives both the probability of sampling
an answer and whether greedy decoding finds it: greedy decoding is correct if and only if every
answer token is the most likely one. `B` problems, `P` prompt tokens, `A` answer tokens, `V`
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trl_qurl.lab.demo.task import PROMPT_TOKENS

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from trl_qurl.lab.demo.algorithms import Trainer


class Accuracy(NamedTuple):
    """Shares of problems in [0, 1]."""

    expected: float  # mean probability of sampling exactly the answer at temperature 1
    greedy: float  # share of problems that greedy decoding answers exactly


def score_answers(answer_logits: Tensor, answer_ids: Tensor) -> Accuracy:
    r"""Compute the accuracy of answers (B, A) from the logits (B, A, V) that predict them.

    The answers are teacher-forced, and the expected accuracy is

    $$\frac{1}{B} \sum_b \exp \sum_a \log \pi(y_{b,a} \mid x_b, y_{b,<a})$$
    """
    all_logps = answer_logits.float().log_softmax(-1)  # (B, A, V)
    logps = all_logps.gather(-1, answer_ids.unsqueeze(-1)).squeeze(-1)  # (B, A)
    probabilities = logps.sum(-1).exp()  # (B,)
    correct = (answer_logits.argmax(-1) == answer_ids).all(-1)  # (B,)
    return Accuracy(expected=probabilities.mean().item(), greedy=correct.float().mean().item())


def measure_policy(model: PreTrainedModel, problem_ids: Tensor) -> Accuracy:
    """Measure the full-precision policy on encoded problems (B, P + A).

    The model's train/eval mode is restored.
    """
    import torch

    ids = problem_ids.to(model.device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits  # (B, P + A, V)
    model.train(was_training)
    return score_answers(logits[:, PROMPT_TOKENS - 1 : -1], ids[:, PROMPT_TOKENS:])


def answers_of_actor(trainer: Trainer, problem_ids: Tensor) -> list[str]:
    """Return the rollout actor's greedy answers, as people write them."""
    from trl_qurl.lab.evaluation.callback import complete_greedily

    prompts = problem_ids[:, :PROMPT_TOKENS].tolist()
    completions = complete_greedily(trainer.vllm_generation, prompts)
    texts = trainer.processing_class.batch_decode(completions, skip_special_tokens=True)
    return [text[::-1].removeprefix("0") for text in texts]  # units come first
