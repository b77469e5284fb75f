"""Steps of a critic on one batch, divided among the processes; prints their gradient norms as JSON.

No engine and no trainer: only what the critic itself does with several processes.
"""

import sys

import torch
from accelerate import Accelerator
from child import print_record
from tiny import tiny_classifier
from trl.trainer.utils import disable_dropout_in_model

from trl_qurl import QuRLPPOConfig
from trl_qurl.trainers.critic import Critic

B = 4
P = 3
T = 5
STEPS = 3


def main(directory):
    args = QuRLPPOConfig(directory, use_cpu=True, bf16=False, steps_per_generation=2)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    ids = torch.randint(2, 90, (B, P + T))
    targets = torch.randn(B, T + 1)
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

    model = tiny_classifier(seed=1)
    disable_dropout_in_model(model)
    critic = Critic(model, args, accelerator)
    critic.prepare(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    steps = []
    for _ in range(STEPS):
        # two micro-batches, of which the last one sums over the processes
        for last in (False, True):
            accelerator.gradient_state._set_sync_gradients(last)
            critic.backward(value_loss(critic.values(batch)))
        steps.append(critic.step())
    kind = type(critic.model).__name__
    print_record({"processes": accelerator.num_processes, "steps": steps, "kind": kind})


if __name__ == "__main__":
    main(sys.argv[1])
