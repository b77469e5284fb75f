"""Two processes train in the quantized forward pass, the policy whole (DDP) or in parts (FSDP2).

No engine. accelerate turns FSDP2 on for GPUs only, so it is told that it is on (`critics.py`).
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from counting import counting_scheme, trainer_in_quantized_forward
from critics import turn_on_fsdp2
from tiny import tiny_model


def main(directory: Path, way: str) -> None:
    scheme = counting_scheme()
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    trainer = trainer_in_quantized_forward(tiny_model(), scheme, directory, max_steps=2, **checkpointing)
    if way == "fsdp2":
        turn_on_fsdp2()
        trainer.is_fsdp_enabled = True
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.accelerator.is_main_process:
        torch.save(weights, directory / "trained.pt")
        print("RECORD " + json.dumps({"rounded": len(scheme.rounded), "model": type(trainer.model_wrapped).__name__}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
