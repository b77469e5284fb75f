"""Disable kernels that vLLM would choose although they fail on this GPU or change the weights."""

import importlib
import os

from trl_qurl.quantization.formats import SCHEMES, gpu_capability
from trl_qurl.quantization.scheme import QuantizationScheme

DISABLED_KERNELS_VARIABLE = "VLLM_DISABLED_KERNELS"  # vLLM's: class names, separated by commas
KERNELS = "vllm.model_executor.kernels.linear"


def kernel_environment(scheme: QuantizationScheme | None) -> dict[str, str]:
    """Return the environment that vLLM needs before an engine of this format starts; empty if the user has set it.

    It is the same for all formats, because vLLM reads its environment only once per process. Raises `ValueError` if
    vLLM has no kernel for the format that works on this GPU.
    """
    capability = gpu_capability()
    if capability is None:
        return {}
    faults = [each.kernel_fault for each in SCHEMES.values()]
    here = [fault for fault in faults if fault is not None and capability >= fault.lowest]
    if not here or DISABLED_KERNELS_VARIABLE in os.environ:
        return {}
    ours = None if scheme is None else scheme.kernel_fault
    if ours in here and not hasattr(importlib.import_module(KERNELS), ours.instead):
        raise ValueError(
            f"This vLLM has no {ours.instead}, and its {ours.kernels[0]} fails on GPUs of compute capability "
            f"{'.'.join(map(str, capability))}: choose another rollout_quantization or another GPU."
        )
    return {DISABLED_KERNELS_VARIABLE: ",".join(kernel for fault in here for kernel in fault.kernels)}
