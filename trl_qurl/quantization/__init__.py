"""Quantization: formats by layer, as a stream of tensors or as a checkpoint on disk.

`uaq` prepares a model for update-aware quantization, which helps its updates survive rounding.
"""

from trl_qurl.quantization.checkpoint import write_checkpoint
from trl_qurl.quantization.formats import SCHEMES, get_scheme, register_scheme
from trl_qurl.quantization.plan import QuantizationPlan, make_plan
from trl_qurl.quantization.scheme import QuantizationScheme

__all__ = [
    "SCHEMES",
    "QuantizationPlan",
    "QuantizationScheme",
    "get_scheme",
    "make_plan",
    "register_scheme",
    "write_checkpoint",
]
