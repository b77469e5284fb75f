"""Parts of one batch in two processes: whiten them, and weigh them by one coefficient; prints a JSON record."""

import json
from types import SimpleNamespace

import torch
from accelerate import Accelerator

from trl_qurl.advantages import explained_variance, masked_moments, whiten
from trl_qurl.trainers.rollouts import QuantizedRolloutsMixin


class Weighing(QuantizedRolloutsMixin):
    """A trainer that does nothing but compute the coefficient of its part."""

    def __init__(self, accelerator: Accelerator) -> None:
        limits = {"vllm_importance_sampling_clip_max": 2.0, "vllm_importance_sampling_clip_min": None}
        self.args = SimpleNamespace(objective="ais", **limits)
        self.accelerator = accelerator
        self.recorded = {}

    def _record(self, metrics: dict[str, float]) -> None:
        self.recorded |= metrics


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    tensor, mask = torch.randn(6, 5), torch.rand(6, 5) > 0.3
    # Unequal parts, as completions of different lengths make them.
    part = slice(0, 2) if accelerator.is_main_process else slice(2, 6)
    tensor, mask = tensor[part], mask[part]

    def add_up(local: torch.Tensor) -> torch.Tensor:
        return accelerator.reduce(local, reduction="sum")

    whitened = whiten(tensor, mask, masked_moments(tensor, mask, add_up))
    explained = explained_variance(tensor, tensor + whitened, mask, add_up)
    trainer = Weighing(accelerator)
    coefficient = trainer._mixing_coefficient(tensor, torch.zeros_like(tensor).masked_fill(~mask, torch.nan)).item()
    parts = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(parts, (whitened.tolist(), coefficient, trainer.recorded))
    if accelerator.is_main_process:
        whitened_parts, coefficients, recorded = zip(*parts, strict=True)
        record = {
            "processes": accelerator.num_processes,
            "whitened": [row for rows in whitened_parts for row in rows],
            "explained_variance": explained,
            "coefficients": coefficients,
            "recorded": recorded,
        }
        print("RECORD " + json.dumps(record))


if __name__ == "__main__":
    main()
