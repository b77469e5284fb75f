"""Fill batches by dynamic sampling, with a made-up policy, in any number of processes; prints the
whole as JSON.
"""

from accelerate import Accelerator
from accelerate.utils import gather_object
from child import print_record
from made_up_policy import ROWS, MadeUpPolicy

from trl_qurl.trainers.dynamic_sampling import PromptStream

GROUPS = 4
GROUP_SIZE = 3
ROLLOUTS = 8


def main():
    accelerator = Accelerator(cpu=True)
    policy = MadeUpPolicy(accelerator, GROUP_SIZE, PromptStream(ROWS, seed=1))
    rollouts = []
    for rollout in range(ROLLOUTS):
        batch = []
        for row in ROWS[rollout * GROUPS :][:GROUPS]:
            batch += [row] * GROUP_SIZE
        size = len(batch) // accelerator.num_processes
        start = accelerator.process_index * size
        filled = policy.fill(batch[start : start + size])
        own = [[sample.row["prompt"], sample.completion] for sample in filled.samples]
        samples = gather_object(own)
        rollouts.append(
            {"samples": samples, "rewards": filled.rewards.tolist(), "metrics": filled.metrics}
        )
    if accelerator.is_main_process:
        print_record({"processes": accelerator.num_processes, "rollouts": rollouts})


if __name__ == "__main__":
    main()
