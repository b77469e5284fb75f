"""A colocated engine as if it sampled one rollout ahead, and got the weights of every update.

While the trainer makes U updates with a rollout, a server samples the next one. Here the weights
before each of these updates are kept, and sample the next rollout afterwards: token t of at most T
from those before update ⌊t · U / T⌋, which is what a server does whose requests all run at once.
Unlike a server that keeps its caches, the engine computes the tokens so far again with each of the
weights.
"""

from itertools import groupby
from typing import Any

import torch
from transformers import TrainerCallback

Weights = list[torch.Tensor]


class WeightsOfUpdates(TrainerCallback):
    """Keeps the weights before each update."""

    def __init__(self) -> None:
        self.kept: list[Weights] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the weights that this update starts from."""
        self.kept.append(weights_of(kwargs["model"]))


def weights_of(model: Any) -> Weights:
    """Return a copy of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def set_weights(model: Any, weights: Weights) -> None:
    """Give the model these parameters."""
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.copy_(value)


def versions_of(length: int, updates: int) -> list[tuple[int, int]]:
    """Return which weights sample the tokens of a completion: the version, and how many of them."""
    versions = [token * updates // length for token in range(length)]
    return [(version, len(list(tokens))) for version, tokens in groupby(versions)]


def update_in_flight(trainer: Any, updates: int) -> None:
    """Sample each rollout with the weights of the `updates` that precede it."""
    generation = trainer.vllm_generation
    sync, generate = generation.sync_weights, generation.generate_from_sent
    history = WeightsOfUpdates()
    trainer.add_callback(history)
    end = trainer.processing_class.eos_token_id
    length = generation.max_completion_length

    def generate_in_flight(prompts: list[list[int]], **kwargs: Any) -> Any:
        latest = weights_of(trainer.model)
        *versions, _ = history.kept  # the last are those of the update that asks for this rollout
        del history.kept[:-1]
        versions = versions or [latest] * updates  # no update precedes the first rollout
        completions: list[list[int]] = [[] for _ in prompts]
        logps: list[list[list[float]]] = [[] for _ in prompts]
        for version, tokens in versions_of(length, updates):
            unfinished = [i for i, tokens in enumerate(completions) if end not in tokens[-1:]]
            if not unfinished:
                break
            set_weights(trainer.model, versions[version])
            sync()
            generation.max_completion_length = tokens
            part = generate(prompts=[prompts[i] + completions[i] for i in unfinished], **kwargs)
            for i, ids, found in zip(unfinished, part.completion_ids, part.logprobs, strict=True):
                completions[i] += ids
                logps[i] += found
        generation.max_completion_length = length
        set_weights(trainer.model, latest)
        return part._replace(prompt_ids=prompts, completion_ids=completions, logprobs=logps)

    generation.sync_weights, generation.generate = lambda: None, generate_in_flight
