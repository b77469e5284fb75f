"""Quantization: formats (`formats`), layer selection (`layers`), as a stream (`stream`) or on disk (`checkpoint`).

`uaq` prepares a model for update-aware quantization, which helps its updates survive rounding.
"""

from trl_qurl.quantization.checkpoint import write_checkpoint
from trl_qurl.quantization.formats import SCHEMES, get_scheme, register_scheme
from trl_qurl.quantization.layers import quantized_layer_names
from trl_qurl.quantization.scheme import QuantizationScheme

__all__ = [
    "SCHEMES",
    "QuantizationScheme",
    "get_scheme",
    "quantized_layer_names",
    "register_scheme",
    "write_checkpoint",
]
