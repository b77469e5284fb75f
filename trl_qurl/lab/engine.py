"""vLLM in this process for a tool, on a checkpoint that no trainer changes."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.rollout import wire
from trl_qurl.rollout.checks.hardware import check_hardware
from trl_qurl.rollout.repairs.cpu_memory import cpu_cache_arguments

if TYPE_CHECKING:
    from vllm import LLM


def start_engine(
    schemes: Iterable[QuantizationScheme],
    arguments: Mapping[str, Any],
    sequences: int,
    length: int,
) -> "LLM":
    """Start vLLM.

    Args:
        schemes: Formats of the checkpoint's layers.
        arguments: For `vllm.LLM`, with `model`, a directory.
        sequences: How many are generated at a time; with `length`, what a CPU's cache must hold.
        length: Tokens of the longest, with its prompt.
    """
    from transformers import AutoConfig

    model = arguments["model"]
    by_name = {scheme.name: scheme for scheme in schemes}
    check_hardware(AutoConfig.from_pretrained(model), by_name, arguments)
    cache = cpu_cache_arguments(model, arguments, sequences=sequences, length=length)
    from vllm import LLM

    # No weights are sent, but its module repairs vLLM in the engine's process.
    extension = {"worker_extension_cls": wire.WORKER_EXTENSION}
    return LLM(**{"seed": 0, **extension, **cache, **arguments})
