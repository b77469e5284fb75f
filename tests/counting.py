"""A format that counts the weights it rounds, and a training run of a tiny model without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from trl_qurl.quantization.formats import get_scheme
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.trainers.callbacks import QuantizedForwardCallback


@dataclass(frozen=True, kw_only=True)
class CountingScheme(QuantizationScheme):
    """INT8, and the shapes of all weights that it has rounded."""

    rounded: list = field(compare=False)

    def quantize(self, weight: torch.Tensor, companions: Sequence[torch.Tensor] = ()) -> dict[str, torch.Tensor]:
        self.rounded.append(weight.shape)
        return super().quantize(weight, companions)


def counting_scheme() -> CountingScheme:
    return CountingScheme(**{**vars(get_scheme("int8")), "name": "counting", "rounded": []})


def trainer_in_quantized_forward(
    model: PreTrainedModel,
    scheme: QuantizationScheme,
    directory: Path,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **settings: Any,
) -> Trainer:
    """transformers' own trainer with the callback of ours."""
    rows = [[first, 6, 7, 8] for first in range(5, 21)]
    common = {"use_cpu": True, "save_strategy": "no", "report_to": [], "per_device_train_batch_size": 2}
    return Trainer(
        model,
        TrainingArguments(str(directory), **{**common, **settings}),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        callbacks=[QuantizedForwardCallback(scheme, ["lm_head"])],
        optimizer_cls_and_kwargs=(optimizer, {"lr": 0.1}),
    )
