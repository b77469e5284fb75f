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
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from child import print_record
from tiny import tiny_classifier, tiny_tokenizer
from trl.trainer.utils import disable_dropout_in_model

from trl_qurl import QuRLPPOConfig
from trl_qurl.trainers.critic import Critic

B, P, T, STEPS = 4, 3, 5, 3


def turn_on_fsdp2() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def main(directory: Path, *options: str) -> None:
    args = QuRLPPOConfig(str(directory), use_cpu=True, bf16=False, steps_per_generation=2)
    accelerator = Accelerator(cpu=True)
    if "fsdp2" in options:
        turn_on_fsdp2()
    torch.manual_seed(0)
    ids, targets = torch.randint(2, 90, (B, P + T)), torch.randn(B, T + 1)
    share = slice(accelerator.process_index * B // accelerator.num_processes, None)
    part = slice(share.start, share.start + B // accelerator.num_processes)
    batch = {"prompt_ids": ids[part, :P], "completion_ids": ids[part, P:]}
    batch |= {
        "prompt_mask": torch.ones_like(ids[part, :P]),
        "completion_mask": torch.ones_like(ids[part, P:]),
    }

    def value_loss(values: torch.Tensor) -> torch.Tensor:
        # A share of the mean over all processes, which average their gradients; as in the trainer.
        return (
            (values - targets[part]).square().sum()
            * accelerator.num_processes
            / targets.numel()
            / 2
        )

    def make() -> Critic:
        model = tiny_classifier(seed=1)
        disable_dropout_in_model(model)
        return Critic(model, args, accelerator)

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def step(critic: Critic) -> float:
        # two micro-batches, of which the last one sums over the processes
        for last in (False, True):
            accelerator.gradient_state._set_sync_gradients(last)
            critic.backward(value_loss(critic.values(batch)))
        return critic.step()

    critic = make()
    critic.prepare(optimizer)
    steps = [step(critic) for _ in range(STEPS)]
    critic.save_state(directory)
    critic.save_pretrained(directory / "critic", tiny_tokenizer())
    accelerator.wait_for_everyone()
    again = make()
    again.prepare(optimizer)
    again.load_state(directory)
    record = {
        "processes": accelerator.num_processes,
        "steps": [*steps, step(critic)],
        "resumed": step(again),
        "kind": type(critic.model).__name__,
        "held": sum(
            getattr(p, "to_local", lambda p=p: p)().numel() for p in critic.model.parameters()
        ),
    }
    if accelerator.is_main_process:
        print_record(record)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
