"""Parts of one batch in two processes: whiten them; prints a JSON record."""

import torch
from accelerate import Accelerator
from child import print_record

from trl_qurl.advantages import explained_variance, masked_moments, whiten


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
    parts = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(parts, whitened.tolist())
    if accelerator.is_main_process:
        record = {
            "processes": accelerator.num_processes,
            "whitened": [row for rows in parts for row in rows],
            "explained_variance": explained,
        }
        print_record(record)


if __name__ == "__main__":
    main()
