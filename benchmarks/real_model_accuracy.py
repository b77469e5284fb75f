"""The exact accuracy of a chat model on a task with one shortest answer per question, without sampling noise."""

from typing import Any

import torch

from benchmarks.chat_tasks import Task
from trl_qurl.lab.demo.record import RolloutRecorder


class ExactAccuracy(RolloutRecorder):
    """
    Adds the float32 policy's `expected_accuracy` on held-out questions to the row of every rollout.

    That is the mean probability of the shortest right completion and the token that ends it. Longer right ones, such
    as "The answer is 12", do not count, so this is a lower bound.

    Args:
        task: Has a `text`.
        tokenizer: With a chat template.
        rollouts: Of the whole run.
    """

    def __init__(self, task: Task, tokenizer: Any, rollouts: int) -> None:
        assert task.text is not None
        prompts = [
            tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each, _ in task.held_out
        ]
        answers = [tokenizer.encode(task.text(right)) + [tokenizer.eos_token_id] for _, right in task.held_out]
        longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        shape = (len(prompts), longest)
        ids, counted = torch.full(shape, tokenizer.eos_token_id), torch.zeros(shape, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)  # padding on the right changes nothing before it
            counted[row, len(prompt) : end] = True
        super().__init__(ids, rollouts)
        self._counted = counted

    def measure(self, model: Any) -> dict[str, float]:
        """The exact accuracy of the current policy."""
        was_training = model.training
        model.eval()
        with torch.no_grad():
            logps = model(input_ids=self.problem_ids).logits[:, :-1].float().log_softmax(-1)
        model.train(was_training)
        chosen = logps.gather(-1, self.problem_ids[:, 1:, None]).squeeze(-1)
        return {"expected_accuracy": (chosen * self._counted[:, 1:]).sum(-1).exp().mean().item()}
