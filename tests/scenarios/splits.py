"""Policies that are split over the processes. accelerate turns FSDP2 and ZeRO on for GPUs only, so a
trainer is told that they are on; all that follows is accelerate's and DeepSpeed's own code.
"""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_param_persistence_threshold": 0,
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
"""A value of `TrainingArguments.deepspeed`; "auto" is what the trainer sets."""


def turn_on(distributed_type, **plugins):
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = distributed_type
    AcceleratorState._shared_state.update(plugins)


def turn_on_fsdp2():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    turn_on(DistributedType.FSDP, fsdp_plugin=plugin)


class UnderFSDP2:
    """In front of a trainer's class."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        turn_on_fsdp2()
        self.is_fsdp_enabled = True


class UnderZeRO3:
    """In front of a trainer's class. The config needs `deepspeed=ZERO3`."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        plugin = self.args.deepspeed_plugin
        turn_on(DistributedType.DEEPSPEED, deepspeed_plugins={"default": plugin})
        plugin.select(_from_accelerator_state=True)
        self.is_deepspeed_enabled = True
