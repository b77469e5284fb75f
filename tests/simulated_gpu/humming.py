"""A double of the package `humming`, which vLLM's CUDA build requires: kernels for formats that a
GPU has no units for.

Only what vLLM imports. What vLLM does around it (renames and deletes parameters, makes locks,
replaces biases) is its own code; the weights are permuted, and padded as vLLM asks.
"""

import sys
import types
from unittest.mock import MagicMock

import torch

FLOATS = ("4e0m3", "4e2m1", "6e2m3", "6e3m2", "8e3m4", "8e4m3", "8e5m2", "8e8m0", "16", "32")
DTYPES = [
    *(f"float{form}" for form in FLOATS),
    "bfloat16",
    "int4",
    "int8",
    *(f"uint{bits}" for bits in range(2, 9)),
]


class DataType(str):
    num_bits = 8
    is_floating_point_type = True

    @classmethod
    def from_torch_dtype(cls, dtype):
        return cls(dtype)

    from_any = from_torch_dtype


class WeightSchema:
    has_zero_point = False
    hadamard_block_size = 0
    b_dtype = DataType("b")

    @classmethod
    def from_config(cls, config):
        return cls()

    def convert_humming(self, tensors, **_):
        return self, dict(tensors)


class InputSchema:
    a_dtype = None
    static_tensor_scale_name = None

    def __init__(self, **_):
        pass

    def convert_humming(self, tensors, **_):
        return self, {}


def prepare_and_transform(tensors, pad_n_to_multiple, **_):
    result = {}
    for name, tensor in tensors.items():
        generator = torch.Generator().manual_seed(3)
        rows = tensor.detach()[torch.randperm(len(tensor), generator=generator)]
        padding = rows.new_zeros(-len(rows) % pad_n_to_multiple, *rows.shape[1:])
        result[name] = torch.cat([rows, padding])
    return None, result


def install():
    modules = {
        "config": {"InputQuantizationMode": MagicMock()},
        "dtypes": {"DataType": DataType, **{name: DataType(name) for name in DTYPES}},
        "schema": {
            "BaseWeightSchema": WeightSchema,
            "BaseInputSchema": InputSchema,
            "HummingInputSchema": InputSchema,
            "HummingWeightSchema": WeightSchema,
        },
        "transform": {"prepare_and_transform_humming_tensors": prepare_and_transform},
    }
    package = sys.modules["humming"] = types.ModuleType("humming")
    package.__path__ = []
    for name, content in modules.items():
        module = sys.modules[f"humming.{name}"] = types.ModuleType(f"humming.{name}")
        vars(module).update(content)
        setattr(package, name, module)


def after_vllm():
    """vLLM asks the real package whether the GPU multiplies activations of a dtype: here never, as
    below 8.9.
    """
    from vllm.model_executor.layers.quantization.utils.humming import linear

    linear.check_and_fallback_input_schema = lambda input_schema, **_: input_schema
