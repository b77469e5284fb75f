"""The noise of a colocated engine: its own, and repeatable.

Drawn as vLLM draws it: Model Runner V1 samples from torch's generator, V2 takes a seed for each
request from NumPy's.
"""

from itertools import product

import numpy
import torch

from trl_qurl.rollout.engine.randomness import EngineNoise


def draw(noise, step, mode="train"):
    with noise.of_generation(step, mode):
        return torch.rand(1).item(), int(numpy.random.randint(2**31))


def test_each_generation_has_its_own_noise():
    drawn = []
    for seed, engine, step in product((1, 2), (0, 1), (0, 1)):
        drawn.append(draw(EngineNoise(seed, engine), step))
    noise = EngineNoise(1, 0)
    drawn += [draw(noise, 2), draw(noise, 2), draw(noise, 2, "eval")]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == len(drawn)


def test_a_resumed_run_draws_what_the_uninterrupted_one_drew():
    whole = EngineNoise(1, 0)
    resumed = EngineNoise(1, 0)
    draw(whole, 0)
    draw(whole, 4)
    # an evaluation before the checkpoint, which the resumed run does not repeat
    draw(whole, 4, "eval")
    assert draw(whole, 8) == draw(resumed, 8)
    assert draw(whole, 8) == draw(resumed, 8)


def test_the_generators_of_the_process_stay_as_they_were():
    def following(draws):
        numpy.random.seed(0)
        torch.manual_seed(0)
        if draws:
            draw(EngineNoise(1, 0), 0)
        return numpy.random.rand(), torch.rand(1).item()

    assert following(draws=True) == following(draws=False)
