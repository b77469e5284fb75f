"""An engine that loaded new weights, compared with one that started from them.

This is tried with CUDA graphs, and after sleep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trl_qurl.lab.doctor.report import Line, Status
from trl_qurl.lab.doctor.trial import build_trainer, train
from trl_qurl.rollout.wire import Continuation

if TYPE_CHECKING:
    from trl_qurl import QuRLGRPOTrainer

PROMPTS = [[token] * 8 for token in range(1, 9)]
STEPS = 8
LIMIT = 0.05  # nats. Rounding explains a hundredth; a graph that reads old memory, whole nats


def check(form: str, name: str) -> list[Line]:
    """Train, load the last weights, and compare answers.

    For the trial `"sleep"`, the engine sleeps between rollouts.
    """
    # Without smoothing, both engines hold what follows from the weights alone.
    trainer = build_trainer(form, smooth_activations=False, vllm_enable_sleep_mode=name == "sleep")
    train(trainer)
    trainer.vllm_generation.sync_weights()
    new = build_trainer(form, trainer.model, smooth_activations=False)
    distance = largest_difference(_continue(trainer), _continue(new))
    engine_config = trainer.vllm_generation.llm.llm_engine.vllm_config
    mode = engine_config.compilation_config.cudagraph_mode.name
    text = (
        f"a reloaded and a new engine differ by {distance:.1e} nats in a log-probability (CUDA "
        f"graphs: {mode})"
    )
    if not distance <= LIMIT:
        raise RuntimeError(f"{text}: the reloaded one reads memory with other weights")
    status = Status.NOTE if mode == "NONE" else Status.OK
    return [Line(name, text, status, data={"distance": distance, "cuda_graphs": mode})]


def _continue(trainer: QuRLGRPOTrainer) -> list[Continuation]:
    engine: Any = trainer.vllm_generation.sync.route.engine
    return engine.continue_greedily(PROMPTS, STEPS)


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
