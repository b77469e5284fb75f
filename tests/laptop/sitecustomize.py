"""On `PYTHONPATH` (`make test CPU=laptop`), this CPU looks like a laptop's without AVX-512 and AMX.

vLLM and trl-qurl ask `torch.cpu.get_capabilities`, torch and oneDNN their own variables. What reads
the processor itself still sees all of it.
"""

import importlib.util
import os
import sys
from types import MappingProxyType

LACKING = ("avx512", "avx10", "avx_vnni", "avx_ne", "amx")  # beginnings of names

os.environ |= {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


class LaptopFinder:
    """Finds `torch.cpu`, and reduces what it says of the processor once it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            real = dict(module.get_capabilities())
            reduced = {key: known for key, known in real.items() if not key.startswith(LACKING)}
            module.get_capabilities = lambda: MappingProxyType(reduced)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, LaptopFinder())
