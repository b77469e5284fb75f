"""Quantization: what is rounded (`layers`), how (`schemes`, `weights`), where it is stored (`storage`, `checkpoint`).

`uaq` prepares a model so that its updates survive rounding (UAQ).
"""

from trl_qurl.quantization.checkpoint import write_checkpoint
from trl_qurl.quantization.layers import quantized_layer_names
from trl_qurl.quantization.schemes import SCHEMES, QuantizationScheme, get_scheme, quantization_config
from trl_qurl.quantization.weights import dequantize_weight, quantize_weight, quantize_weights

__all__ = [
    "SCHEMES",
    "QuantizationScheme",
    "dequantize_weight",
    "get_scheme",
    "quantization_config",
    "quantize_weight",
    "quantize_weights",
    "quantized_layer_names",
    "write_checkpoint",
]
