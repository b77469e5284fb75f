"""Steps of a critic on one batch, split over the processes, saved and resumed; prints what became
of it as JSON.

No engine and no trainer: only what the critic itself does with several processes. accelerate turns
FSDP2 on for GPUs only, so with the argument `fsdp2` it is told that it is on; all that follows is
its own code.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from child import print_record
from splits import turn_on_fsdp2
from tiny import tiny_classifier, tiny_tokenizer
from torch.distributed.tensor import DTensor
from trl.trainer.utils import disable_dropout_in_model

from trl_qurl import QuRLPPOConfig
from trl_qurl.trainers.critic import Critic

B, P, T, STEPS = 4, 3, 5, 3


def main(directory, *options):
    args = QuRLPPOConfig(str(directory), use_cpu=True, bf16=False, steps_per_generation=2)
    accelerator = Accelerator(cpu=True)
    if "fsdp2" in options:
        turn_on_fsdp2()
    torch.manual_seed(0)
    ids, targets = torch.randint(2, 90, (B, P + T)), torch.randn(B, T + 1)
    count = B // accelerator.num_processes
    start = accelerator.process_index * count
    part = slice(start, start + count)
    batch = {
        "prompt_ids": ids[part, :P],
        "completion_ids": ids[part, P:],
        "prompt_mask": torch.ones(count, P, dtype=torch.long),
        "completion_mask": torch.ones(count, T, dtype=torch.long),
    }

    def value_loss(values):
        # A share of the mean over all processes, which average their gradients; as in the trainer.
        squares = (values - targets[part]).square().sum()
        return squares * accelerator.num_processes / targets.numel() / 2

    def prepared():
        model = tiny_classifier(seed=1)
        disable_dropout_in_model(model)
        critic = Critic(model, args, accelerator)
        critic.prepare(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
        return critic

    def step(critic):
        # two micro-batches, of which the last one sums over the processes
        for last in (False, True):
            accelerator.gradient_state._set_sync_gradients(last)
            critic.backward(value_loss(critic.values(batch)))
        return critic.step()

    critic = prepared()
    steps = [step(critic) for _ in range(STEPS)]
    critic.save_state(directory)
    critic.save_pretrained(directory / "critic", tiny_tokenizer())
    accelerator.wait_for_everyone()
    again = prepared()
    again.load_state(directory)
    held = (p.to_local() if isinstance(p, DTensor) else p for p in critic.model.parameters())
    print_record(
        {
            "processes": accelerator.num_processes,
            "steps": [*steps, step(critic)],
            "resumed": step(again),
            "kind": type(critic.model).__name__,
            "held": sum(p.numel() for p in held),
        }
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
