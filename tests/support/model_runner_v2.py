"""vLLM's Model Runner V2 on a CPU: its Triton kernels run in Triton's interpreter.

GPUs run V2 by default. vLLM's CPU build has it, too, but asks for a Triton with a CPU backend.
Import this before vLLM, in a process of its own.
"""

import importlib.metadata
import os
from types import SimpleNamespace

os.environ |= {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",  # it would compile for the backend that is not there
}


def find_triton() -> None:
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
