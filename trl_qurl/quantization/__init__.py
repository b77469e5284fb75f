"""Quantization: formats (`formats`), layer selection (`layers`), as a stream (`stream`) or on disk (`checkpoint`).

`uaq` prepares a model for update-aware quantization, which helps its updates survive rounding.
"""

from trl_qurl.quantization.checkpoint import write_checkpoint
from trl_qurl.quantization.formats import SCHEMES, get_scheme, register_scheme
from trl_qurl.quantization.layers import quantized_layer_names
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.stream import quantize_weights

__all__ = [
    "SCHEMES",
    "QuantizationScheme",
    "get_scheme",
    "quantize_weights",
    "quantized_layer_names",
    "register_scheme",
    "write_checkpoint",
]
