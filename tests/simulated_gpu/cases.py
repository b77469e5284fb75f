"""The cases: every format on every GPU, corners, and faults of vLLM that we repair or refuse."""

import json
from itertools import chain, product

from simulated_gpu.engine import Case
from simulated_gpu.platform import GPUS
from trl_qurl.quantization.formats import FORMATS

MATRIX = [Case(gpu, scheme.name) for scheme, gpu in product(FORMATS, GPUS)]

MIXED_GPUS = ("A100", "RTX 40", "H100", "B200")


def mixed(scheme, other):
    """Formats by pattern. Each has fused layers with a bias, and both are in one decoder layer."""
    return json.dumps({r"re:.*(layers\.1\.self_attn|down_proj)": other, "*": scheme})


def experts(gpu, scheme, **settings):
    """A mixture whose experts are quantized."""
    return Case(gpu, scheme, "qwen3_moe", experts=True, **settings)


MIXED = {}
for scheme, other in product(("int8", "fp8"), ("w8a16", "w4a16", "none")):
    MIXED[scheme, other] = [Case(gpu, mixed(scheme, other)) for gpu in MIXED_GPUS]
"""Two formats in one engine: eight bits, with other layers in a finer format, in a smaller one, or
in 16 bits.
"""

ON_THE_PAGE = [*MATRIX, *chain(*MIXED.values())]
"""What the tables in docs/choosing.md show."""

ALWAYS = {
    Case("A100", "int8"): {"qkv_proj": "CutlassInt8ScaledMMLinearKernel"},
    Case("A100", "int8", runner="V1"): {"qkv_proj": "CutlassInt8ScaledMMLinearKernel"},
    Case("A100", "int8", backend="humming"): {"qkv_proj": "HummingInt8ScaledMMLinearKernel"},
    # CUTLASS's is disabled by us
    Case("B200", "int8"): {"qkv_proj": "TritonInt8ScaledMMLinearKernel"},
    Case("H100", "fp8", sleeps=True, cache="fp8"): {"qkv_proj": "CutlassFP8ScaledMMLinearKernel"},
    # DeepGEMM's, too
    Case("H100", "fp8_block"): {"qkv_proj": "CutlassFp8BlockScaledMMKernel"},
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


CORNERS = [
    *(Case("H100", name, backend="marlin") for name in ("fp8", "fp8_block")),
    Case("H100", "fp8", "qwen3", sleeps=True, backend="humming"),
    Case("A100", "w4a16", adapter=True),
    *(Case("H100", name, head=True) for name in ("int8", "fp8", "w4a16", "w8a16")),
    *(Case("H100", name, sleeps=True, cache="fp8") for name in ("int8", "fp8_block", "w4a16")),
    *(Case("H100", "fp8", sleeps=True, cache=f"{kind}_per_token_head") for kind in ("int8", "fp8")),
    *(Case("H100", name, rank=rank) for name, rank in product(("int8", "fp8", "w4a16"), (0, 1))),
    Case("A100", mixed("int8", "w4a16"), sleeps=True),
    Case("A100", "w4a16", "qwen3"),
    *(experts("A100", name) for name in ("int8", "w8a16", "w4a16")),
    experts("RTX 40", "fp8"),
    *(experts("H100", name) for name in ("int8", "fp8", "fp8_block")),
    experts("H100", "fp8", sleeps=True),
    *(Case("H100", name, "qwen3_moe") for name in ("int8", "w4a16")),  # experts in 16 bits
]
"""Other settings that change which code runs. Not simulated: experts on Blackwell (DeepGEMM),
FlashInfer's experts, and Humming's, which vLLM takes for `w4a16` on Hopper.
"""

FREED = "graphs read freed memory"

FAULTS = {
    # Marlin moves a bias
    Case("A100", "w4a16"): (FREED, "self_attn.qkv_proj.bias"),
    # a bias without a loader
    Case("A100", "int8", backend="humming"): (
        "reload",
        "TypeError: too many positional arguments",
    ),
    # kernels' own tensors
    Case("H100", "fp8", "qwen3", backend="humming"): (FREED, "locks"),
    experts("H100", "fp8"): (FREED, "ab_strides1"),
}
"""Cases in which vLLM's own reload has a fault, its kind, and a part of its words."""
