"""The cases: every format on every GPU, corners, and faults of vLLM that we repair or refuse."""

import json
from dataclasses import replace
from itertools import product

from simulated_gpu.engine import Case
from simulated_gpu.platform import GPUS
from trl_qurl.quantization.formats import FORMATS

MATRIX = [Case(gpu, scheme.name) for scheme in FORMATS for gpu in GPUS]

MIXED_GPUS = ("A100", "RTX 40", "H100", "B200")


def mixed(scheme: str, other: str) -> str:
    """Formats by pattern. Each has fused layers with a bias, and both are in one decoder layer."""
    return json.dumps({r"re:.*(layers\.1\.self_attn|down_proj)": other, "*": scheme})


MIXED = {
    (scheme, other): [Case(gpu, mixed(scheme, other)) for gpu in MIXED_GPUS]
    for scheme, other in product(("int8", "fp8"), ("w8a16", "w4a16", "none"))
}
"""Two formats in one engine: eight bits, with other layers in a finer format, in a smaller one, or
in 16 bits.
"""

ALWAYS = {
    Case("A100", "int8"): {"qkv_proj": "CutlassInt8ScaledMMLinearKernel"},
    Case("A100", "int8", runner="V1"): {"qkv_proj": "CutlassInt8ScaledMMLinearKernel"},
    # CUTLASS's is disabled by us
    Case("B200", "int8"): {"qkv_proj": "TritonInt8ScaledMMLinearKernel"},
    Case("H100", "fp8", sleeps=True, cache="fp8"): {"qkv_proj": "CutlassFP8ScaledMMLinearKernel"},
    Case("A100", "w4a16"): {"qkv_proj": "MarlinLinearKernel"},
    Case("H100", "w4a16"): {"qkv_proj": "MacheteLinearKernel"},
    Case("H100", "w4a16", adapter=True): {"base_layer": "MacheteLinearKernel"},
    Case("A100", mixed("int8", "w8a16")): {
        "qkv_proj": "CutlassInt8ScaledMMLinearKernel",
        "down_proj": "MarlinLinearKernel",
    },
    Case("H100", mixed("fp8", "w4a16"), sleeps=True): {
        "qkv_proj": "CutlassFP8ScaledMMLinearKernel",
        "down_proj": "MacheteLinearKernel",
    },
}
"""Cases that are always simulated, and the kernels that vLLM chooses for layers of each."""


def runs(case: Case) -> bool:
    """Check that we accept the formats on the GPU."""
    return all(scheme.runs_on(GPUS[case.gpu]) for scheme in case.schemes)


# Other packages may register formats that vLLM runs by these kernels.
WEIGHT_ONLY = [replace(case, is_refused=False) for case in MATRIX if not runs(case)]

CORNERS = [
    *WEIGHT_ONLY,
    *(Case("B200", scheme.name, runner="V1") for scheme in FORMATS),
    Case("A100", "w4a16", adapter=True),
    *(Case("H100", name, head=True) for name in ("int8", "fp8", "w4a16", "w8a16")),
    *(Case("H100", name, sleeps=True, cache="fp8") for name in ("int8", "fp8_block", "w4a16")),
    *(Case("H100", "fp8", sleeps=True, cache=f"{kind}_per_token_head") for kind in ("int8", "fp8")),
    *(Case("H100", name, rank=rank) for name in ("int8", "fp8", "w4a16") for rank in (0, 1)),
    Case("A100", mixed("int8", "w4a16"), sleeps=True),
    Case("A100", "w4a16", "qwen3"),
    Case("A100", "fp8", "qwen3", sleeps=True, is_refused=False),
    *(
        Case(gpu, name, "qwen3_moe", experts=True, has_flashinfer=False)
        for gpu, names in {
            "A100": ("int8", "w8a16", "w4a16"),
            "RTX 40": ("fp8",),
            "H100": ("int8", "fp8", "fp8_block"),
        }.items()
        for name in names
    ),
    Case("H100", "fp8", "qwen3_moe", experts=True, sleeps=True, has_flashinfer=False),
    Case("A100", "fp8", "qwen3_moe", experts=True, has_flashinfer=False, is_refused=False),
    *(Case("H100", name, "qwen3_moe") for name in ("int8", "w4a16")),  # experts in 16 bits
]
"""Other settings that change which code runs. Not simulated: experts on Blackwell (DeepGEMM),
FlashInfer's experts, and Humming's, which vLLM takes for `w4a16` on Hopper.
"""

FREED, STALE = "graphs read freed memory", "graphs read other values"
EXPERTS = Case("H100", "fp8", "qwen3_moe", experts=True, has_flashinfer=False)

FAULTS = [
    ("Marlin moves a bias", Case("A100", "w4a16"), FREED, "self_attn.qkv_proj.bias"),
    ("Marlin moves a bias", Case("A100", mixed("int8", "w8a16")), FREED, "self_attn.qkv_proj.bias"),
    ("Marlin moves a bias", Case("B200", "w8a16"), STALE, "self_attn.qkv_proj.bias"),
    (
        "A bias without a loader",
        Case("A100", "fp8", is_refused=False),
        "reload",
        "TypeError: too many positional arguments",
    ),
    (
        "A bias without a loader",
        Case("RTX 40", "fp8_block", is_refused=False),
        "reload",
        "AssertionError",
    ),
    ("Kernels' own tensors", Case("A100", "fp8", "qwen3", is_refused=False), FREED, "locks"),
    ("Kernels' own tensors", EXPERTS, FREED, "ab_strides1"),
]
"""Faults of vLLM's own reload: a report in docs/upstream.md, a case, the kind of fault, and a part
of its words.
"""
