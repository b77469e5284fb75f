"""Three steps of either critic on one batch, split over the processes; prints parameters and learning rates as JSON.

No engine and no trainer: only what the critics themselves do with several processes.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate import Accelerator
from tiny import tiny_model
from transformers import AutoModelForTokenClassification
from trl.trainer.utils import disable_dropout_in_model

from trl_qurl import QuRLPPOConfig
from trl_qurl.trainers.critic import Critic, build_optimizer
from trl_qurl.trainers.shared_backbone import SharedBackboneCritic

B, P, T, STEPS = 4, 3, 5, 3


def main() -> None:
    args = QuRLPPOConfig(
        tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        optim="sgd",
        critic_learning_rate=0.1,
        critic_lr_scheduler_type="linear",
        steps_per_generation=2,
    )
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    ids, targets = torch.randint(2, 90, (B, P + T)), torch.randn(B, T + 1)
    config = tiny_model().config
    config.num_labels = 1
    value_model = AutoModelForTokenClassification.from_config(config)
    disable_dropout_in_model(value_model)
    share = slice(accelerator.process_index * B // accelerator.num_processes, None)
    part = slice(share.start, share.start + B // accelerator.num_processes)
    batch = {"prompt_ids": ids[part, :P], "completion_ids": ids[part, P:]}
    batch |= {"prompt_mask": torch.ones_like(ids[part, :P]), "completion_mask": torch.ones_like(ids[part, P:])}

    def value_loss(values: torch.Tensor) -> torch.Tensor:
        # A share of the mean over all processes, which average their gradients; as in the trainer.
        return (values - targets[part]).square().sum() * accelerator.num_processes / targets.numel()

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, args, decayed=set())

    policy = tiny_model()
    critics = {
        "own": Critic(value_model, args, accelerator, optimizer),
        "shared": SharedBackboneCritic(policy, args, accelerator, optimizer),
    }
    record: dict[str, object] = {"processes": accelerator.num_processes}
    for name, critic in critics.items():
        critic.prepare(num_training_steps=10)
        steps = []
        for _ in range(STEPS):
            with critic.watching():
                logits = policy(input_ids=ids[part]).logits
            critic.add_to_policy_loss(logits.sum() * 0, batch, value_loss).backward()
            critic.learn(batch, value_loss)
            steps.append(critic.step())
        parameters = torch.cat([parameter.detach().flatten() for parameter in critic.model.parameters()])
        everywhere = accelerator.gather(parameters.unsqueeze(0))
        record[name] = {
            "steps": steps,
            "same_everywhere": bool((everywhere == everywhere[0]).all()),
            "parameters": parameters[-200:].tolist(),
            "norm": parameters.norm().item(),
        }
    if accelerator.is_main_process:
        print("RECORD " + json.dumps(record))


if __name__ == "__main__":
    main()
