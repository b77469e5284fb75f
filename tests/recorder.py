"""Records the collectives of each process, and compares every one with the other processes' before
it runs.

Processes that get out of order would hang, or abort inside gloo, minutes later and elsewhere. Here
both name the first collective that differs, and where each of them is. What ends an operation
counts as its last collective.
"""

import json
import re
import traceback
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PATIENCE = timedelta(seconds=20)
SHOWN = "/trl_qurl/|/trl/|/tests/(?!recorder)"


class OutOfOrder(BaseException):
    """Processes differ in a collective. Not an `Exception`, which the project would answer with
    more collectives.
    """


class Recorder(TorchDispatchMode):
    """Sees every collective of a process: torch's operators, through which Python and C++ both
    call a group.

    Args:
        store: Which all processes reach, on a connection of its own.
    """

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.total = 0
        self.store.set_timeout(PATIENCE)

    def run(self, name, act):
        """Run an operation that all processes run; the error's name, "done", or how the processes
        differ.
        """
        self.name = name
        self.counts = Counter()
        self.difference = None
        try:
            try:
                act()
                outcome = "done"
            except Exception as error:
                outcome = type(error).__name__
            self.meet(["end", outcome], tuple(range(dist.get_world_size())))
        except OutOfOrder as error:
            return f"OutOfOrder: {error}"
        return outcome

    def share(self, name, value):
        """The main process's value, in all processes."""
        if dist.get_rank() == 0:
            self.store.set(f"shared/{name}", json.dumps(value))
        return json.loads(self.store.get(f"shared/{name}"))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls collectives of its own
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self.record(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def record(self, operation, args):
        leaves = tree_leaves(args)
        groups = [
            dist.ProcessGroup.unbox(leaf)
            for leaf in leaves
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
        ]
        names = [leaf for leaf in leaves if isinstance(leaf, str)]  # of a group, and of a reduction
        if not groups and not names:
            return  # it only waits for a result, or wraps one
        [group] = groups or [dist.distributed_c10d._resolve_process_group(names[-1])]
        nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        made = [operation, group.group_name, nbytes]
        if operation != "barrier":  # a barrier's only number is its device
            made += [leaf for leaf in leaves if type(leaf) is int]  # the root
        self.total += 1
        self.meet(made, tuple(dist.get_process_group_ranks(group)))

    def meet(self, made, ranks):
        """Raise `OutOfOrder` unless all of these processes do the same next."""
        if self.difference:  # an operation that cleans up goes on
            raise OutOfOrder(self.difference)
        self.counts[ranks] += 1
        key = f"{self.name}/{ranks}/{self.counts[ranks]}"
        # Where this process is in the project, in TRL and in the tests.
        calls = [line for line in traceback.format_stack() if re.search(SHOWN, line)]
        own = dist.get_rank()
        self.store.set(f"{key}/{own}", json.dumps([made, calls]))
        all_made = {}
        try:
            for rank in ranks:
                of_rank = self.store.get(f"{key}/{rank}")
                all_made[rank] = json.loads(of_rank)
        except dist.DistStoreError:
            all_made = {own: [made, calls], "another": ["nothing in time", []]}
        if any(theirs != made for theirs, _ in all_made.values()):
            self.difference = f"collective {self.counts[ranks]} differs"
            for rank, (theirs, lines) in all_made.items():
                self.difference += f"\nprocess {rank}: {theirs}\n{''.join(lines)}"
            raise OutOfOrder(self.difference)
