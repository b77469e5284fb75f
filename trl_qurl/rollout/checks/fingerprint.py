"""Fingerprints of a policy, which change with its weights."""

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from trl_qurl.quantization.merging import reshard
from trl_qurl.rollout.checks.tensors import as_words


class Changes(NamedTuple):
    """Counts of torch and settings of PEFT, without a look at the weights."""

    counters: list[int]  # of changes, by parameter; writing to `.data` counts none
    adapters: list[str]  # which are active, and how strongly


class Fingerprint(NamedTuple):
    """A summary that tells a policy's weights from later ones."""

    changes: Changes
    sums: bytes  # of the bits of each row of each parameter

    def values(self) -> tuple[bytes, list[str]]:
        """Return what is the same after a change that changed nothing."""
        return self.sums, self.changes.adapters


def fingerprint(model: Any) -> Fingerprint:
    """Return the fingerprint of a policy. Reads all weights of this process once."""
    reshard(model)
    sums = []
    for parameter in model.parameters():
        shard = getattr(parameter, "ds_tensor", parameter).detach()  # ZeRO-3's
        tensor = shard.to_local() if isinstance(shard, DTensor) else shard
        sums.append(as_words(tensor).sum(1).to(model.device))
    return Fingerprint(counted_changes(model), torch.cat(sums).cpu().numpy().tobytes())


def counted_changes(model: Any) -> Changes:
    """Return what has been counted so far."""
    adapters = [
        str((module.disable_adapters, module.active_adapters, getattr(module, "scaling", None)))
        for module in model.modules()
        if hasattr(module, "base_layer") or hasattr(module, "modules_to_save")
    ]
    return Changes([parameter._version for parameter in model.parameters()], adapters)
