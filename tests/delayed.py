"""A reference for rollouts ahead: a synchronous trainer that is
delayed by one rollout on purpose.
"""

from typing import Any


def record_prompts(trainer: Any) -> list[list[list[int]]]:
    """The prompts of each rollout, which grow as the trainer goes on."""
    seen, generate = [], trainer.vllm_generation.generate

    def recorded(prompts, *args, **kwargs):
        seen.append(prompts)
        return generate(prompts, *args, **kwargs)

    trainer.vllm_generation.generate = recorded
    return seen


def delay(trainer: Any, order: list[list[list[int]]], lost: tuple[int, ...] = ()) -> None:
    """Let a synchronous trainer sample each rollout with the weights of the one before, unless that
    was `lost`.
    """
    generation, ready, count = trainer.vllm_generation, [], iter(range(len(order)))
    generate = generation.generate

    def delayed(prompts, images, num_generations, **kwargs):
        if not trainer.model.training:
            return generate(prompts, images, num_generations)
        rollout = next(count)
        assert prompts == order[rollout]
        output = ready.pop() if ready else generate(prompts, images, num_generations)
        if rollout in lost:
            output = generate(prompts, images, num_generations)
        if rollout + 1 < len(order):
            ready.append(generate(order[rollout + 1], images, num_generations))
        generation.samples = generation.samples._replace(
            completions=output[1], behavior_logps=output[2], behavior_ids=output[3]
        )
        return output

    generation.generate = delayed
