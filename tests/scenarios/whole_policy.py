"""Two processes, each with a part of a policy (FSDP2), save it; prints what `save_model` and a
checkpoint left behind.

No engine: transformers' own trainer with our saving. accelerate turns FSDP2 on for GPUs only, so it
is told that it is on (`splits.py`); what splits the model, gathers it and writes it is
transformers' and accelerate's own code.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from child import print_record
from datasets import Dataset
from splits import turn_on_fsdp2
from tiny import tiny_model, tiny_tokenizer
from transformers import Trainer, TrainingArguments

from trl_qurl.trainers.engine import QuantizedEngineMixin


class SavingTrainer(QuantizedEngineMixin, Trainer):
    """Saves as a trainer of this project; the rest is transformers' own."""

    __init__ = Trainer.__init__
    _prepare_inputs = Trainer._prepare_inputs
    compute_loss = Trainer.compute_loss
    _save_checkpoint = Trainer._save_checkpoint
    train = Trainer.train


def main(directory, state_dict_type):
    os.environ["FSDP_STATE_DICT_TYPE"] = state_dict_type
    data = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 8, "labels": [[5, 6, 7, 8]] * 8})
    args = TrainingArguments(
        str(directory),
        use_cpu=True,
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
        report_to=[],
        learning_rate=0.1,
    )
    trainer = SavingTrainer(
        tiny_model(), args, train_dataset=data, processing_class=tiny_tokenizer()
    )
    turn_on_fsdp2()
    trainer.is_fsdp_enabled = True
    trainer.vllm_generation = SimpleNamespace(weights=SimpleNamespace(grid=torch.bfloat16))
    trainer.train()
    trainer.save_model(str(directory / "policy"))
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.accelerator.is_main_process:
        torch.save(weights, directory / "expected.pt")
    kind = str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
    print_record({"kind": kind, "split": type(trainer.model).__name__})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
