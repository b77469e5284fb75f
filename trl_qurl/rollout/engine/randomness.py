"""The noise that a colocated engine samples with.

vLLM draws it from global generators of its process, here the trainer's: Model Runner V1 from
torch's, and V2, the default on GPUs, from NumPy's. A reward function that calls `np.random.seed(0)`
would give every rollout the same noise, and one that draws on some ranks only would let the ranks
of a tensor-parallel engine sample different tokens. So each generation gets noise of its own, and
leaves the generators as it found them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from zlib import crc32

import numpy as np
import torch


class EngineNoise:
    """Noise that depends on the run's seed, the engine, the training step, and nothing else.

    A run that resumes at a step samples what the uninterrupted run sampled there.

    Args:
        seed: The run's seed.
        engine: Number of the engine. All ranks of a tensor-parallel engine must draw the same
            noise.
    """

    def __init__(self, seed: int, engine: int) -> None:
        self._seed = seed
        self._engine = engine
        self._step = 0
        self._generations: Counter[str] = Counter()  # of this step, by mode

    @contextmanager
    def of_generation(self, step: int, mode: str) -> Iterator[None]:
        """Generate inside the block.

        Args:
            step: Optimizer steps so far.
            mode: "train" or "eval". An evaluation does not change the noise of training.
        """
        if step != self._step:
            self._step = step
            self._generations.clear()
        number = self._generations[mode]
        self._generations[mode] += 1
        name = f"seed{self._seed}-engine{self._engine}-step{step}-{mode}{number}"
        seed = crc32(name.encode())
        state_of_numpy = np.random.get_state()
        try:
            with _generators():
                np.random.seed(seed)
                torch.manual_seed(seed)
                yield
        finally:
            np.random.set_state(state_of_numpy)


def _generators() -> AbstractContextManager[None]:
    """Restore torch's generators of the CPU and of this process's device at the block's end."""
    devices = []
    if torch.accelerator.is_available():
        devices.append(torch.accelerator.current_device_index())
    return torch.random.fork_rng(devices)
