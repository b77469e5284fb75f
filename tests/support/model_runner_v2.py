"""vLLM's Model Runner V2 on a CPU: its Triton kernels run in Triton's interpreter, and sleep loses
what it does on a GPU.

GPUs run V2 by default. vLLM's CPU build has it, too, but asks for a Triton with a CPU backend.
Import this before vLLM, in a process of its own.
"""

import importlib.metadata
import os
from types import SimpleNamespace

import torch
from simulated_gpu import tensors
from torch.overrides import TorchFunctionMode

os.environ |= {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",  # it would compile for the backend that is not there
}


def find_triton():
    """Let vLLM look for Triton while there is a backend of that name."""
    from triton.backends import backends  # reads TRITON_INTERPRET

    installed = importlib.metadata.version
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    # it asks for its own distribution by the name of the GPU build
    importlib.metadata.version = lambda name: "cpu" if name == "vllm" else installed(name)
    try:
        import vllm.triton_utils
    finally:
        importlib.metadata.version = installed
        del backends["cpu"]
    assert vllm.triton_utils.HAS_TRITON


find_triton()


class OnDevice(TorchFunctionMode):
    """Keeps what is allocated on the engine's device; V2 gives the host's as a string."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance((kwargs or {}).get("device"), torch.device):
            self.made.append(result)
        return result


def allow_sleep():
    """Let engines sleep. At level 2, they lose what `load_model` has allocated, except for the
    model's buffers: vLLM's worker for GPUs saves these.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    load_model = CPUModelRunner.load_model

    def recorded(runner, *args, **kwargs):
        with OnDevice() as runner.on_device:
            load_model(runner, *args, **kwargs)

    def sleep(worker, level=1):
        runner = worker.model_runner
        if level == 2:
            held = tensors.held_tensors(runner.model)
            for number, made in enumerate(runner.on_device.made):
                held[str(number)] = tensors.Held(made, False)
            tensors.sleep(held)

    CPUModelRunner.load_model = recorded
    CPUWorker.sleep = sleep
    CpuPlatform.is_sleep_mode_available = lambda self: True


allow_sleep()
