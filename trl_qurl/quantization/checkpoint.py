"""Whole quantized checkpoints: weights, config and tokenizer, as vLLM starts from them.

There are two ways to make one. llm-compressor is the reference for what a W8A8 checkpoint is; the streamed writer
needs no llm-compressor (which pip cannot install beside vLLM), holds no second model, and writes the same codes and
scales. This is the only file that imports llm-compressor.
"""

import contextlib
import gc
import importlib.util
import io
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from trl_qurl.quantization.layers import quantized_layer_names
from trl_qurl.quantization.schemes import QuantizationScheme, get_scheme
from trl_qurl.quantization.storage import check_replaceable, new_directory, write_config, write_tensors
from trl_qurl.quantization.stream import NamedTensors, quantize_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

QUANTIZERS = ("streaming", "llmcompressor")


def require_llmcompressor(setting: str = "quantizer='llmcompressor'", instead: str = "quantizer='streaming'") -> None:
    """
    Args:
        setting: What asks for it, for the message.
        instead: What to use without it.

    Raises:
        ImportError: If llm-compressor is not installed; the message says which extra brings it.
    """
    if importlib.util.find_spec("llmcompressor") is None:
        raise ImportError(
            f"{setting} needs llm-compressor, which is not installed: run "
            f"`pip install trl-qurl[llmcompressor]`, or use {instead}: it writes the same codes without it."
        )


def write_checkpoint(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    scheme: str,
    output_dir: str | os.PathLike[str],
    *,
    ignore: Sequence[str] = ("lm_head",),
    quantizer: str = "streaming",
    show_progress: bool = False,
) -> None:
    """
    Write a quantized checkpoint of a model, ready for `vllm serve`. No calibration data is needed.

    Args:
        model: Full-precision model. Not modified; llm-compressor works on a copy, so memory holds the model twice.
        tokenizer: Saved beside the weights, unless `None`.
        scheme: Name of the format, one of `SCHEMES`.
        output_dir: Directory to create; an earlier quantized checkpoint is replaced once the new one is complete.
        ignore: Modules kept in full precision, in llm-compressor's pattern syntax.
        quantizer: `"streaming"`, or `"llmcompressor"` for that package itself, which writes the same tensors.
        show_progress: Show a bar on a terminal; llm-compressor does its work in one go and has none.

    Raises:
        ValueError: Unknown scheme or quantizer, or nothing left to quantize.
        ImportError: llm-compressor is asked for and missing.
        FileExistsError: The directory holds something else than a quantized checkpoint.
        OSError: The directory cannot be written; nothing is left behind.
    """
    check_quantizer(quantizer)
    chosen = get_scheme(scheme)
    layers = quantized_layer_names(model, ignore, chosen)
    check_replaceable(output_dir)
    parameters: NamedTensors = ((name, parameter.data) for name, parameter in model.named_parameters())
    if show_progress and quantizer == "streaming":
        count = sum(1 for _ in model.named_parameters())
        parameters = tqdm(parameters, f"Rounding to {chosen.label}", count, disable=None)
    write_parameters(parameters, model, tokenizer, chosen, layers, ignore, quantizer, output_dir)


def check_quantizer(name: str) -> None:
    """
    Raises:
        ValueError: If there is no such quantizer.
        ImportError: If it is llm-compressor, which is not installed.
    """
    if name not in QUANTIZERS:
        raise ValueError(f"Unknown quantizer {name!r}: choose one of {', '.join(map(repr, QUANTIZERS))}.")
    if name == "llmcompressor":
        require_llmcompressor()


def write_parameters(
    named_tensors: NamedTensors,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    scheme: QuantizationScheme,
    layers: Collection[str],
    ignore: Collection[str],
    quantizer: str,
    output_dir: str | os.PathLike[str],
) -> None:
    """
    Quantize full-precision tensors into a checkpoint.

    Args:
        named_tensors: Parameters under their checkpoint names, each read once.
        model: Where config and generation config come from.
        tokenizer: Saved beside the weights, unless `None`.
        scheme: Target format.
        layers: What `quantized_layer_names` says of the model and `ignore`.
        ignore: Modules kept in full precision.
        quantizer: One of `QUANTIZERS`.
        output_dir: Directory to create or to replace.

    Raises:
        OSError: The directory cannot be written; nothing is left behind.
    """
    if quantizer == "streaming":
        tensors = quantize_weights(named_tensors, scheme, layers)
        write_streamed_checkpoint(tensors, model, tokenizer, scheme, ignore, output_dir)
    else:
        write_llmcompressor_checkpoint(named_tensors, model, tokenizer, scheme, ignore, output_dir)


def write_streamed_checkpoint(
    named_tensors: NamedTensors,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    scheme: QuantizationScheme | None,
    ignore: Collection[str],
    output_dir: str | os.PathLike[str],
) -> int:
    """
    Write tensors that are already in checkpoint format, with the config of `model`.

    Args:
        named_tensors: Output of `quantize_weights`, or plain parameters with `scheme=None`.
        model: Where config and generation config come from.
        tokenizer: Saved beside the weights, unless `None`.
        scheme: Format of the tensors; `None` for an unquantized checkpoint.
        ignore: Patterns that were kept in full precision, for the engine to know.
        output_dir: Directory to create or to replace.

    Returns:
        Bytes of tensor data written.

    Raises:
        OSError: The directory cannot be written; nothing is left behind.
    """
    with new_directory(output_dir) as draft:
        written = write_tensors(named_tensors, draft)
        _write_companions(model, tokenizer, draft)
        write_config(model, draft, scheme.quantization_config(list(ignore)) if scheme else None)
    return written


def write_llmcompressor_checkpoint(
    named_tensors: NamedTensors,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    scheme: QuantizationScheme,
    ignore: Collection[str],
    output_dir: str | os.PathLike[str],
) -> None:
    """
    Write a checkpoint with llm-compressor's `oneshot` (data-free), from full-precision tensors.

    Args:
        named_tensors: Parameters under their checkpoint names. Copied to host memory.
        model: Gives class, config and generation config of the copy that is quantized.
        tokenizer: Saved beside the weights, unless `None`.
        scheme: Target format.
        ignore: Modules kept in full precision.
        output_dir: Directory to create or to replace.

    Raises:
        OSError: The directory cannot be written; nothing is left behind.
    """
    require_llmcompressor()
    from llmcompressor import reset_session

    try:
        _quantize_duplicate(_duplicate(named_tensors, model), model, tokenizer, scheme, ignore, output_dir)
    finally:
        # The copy is bound in cycles, and llm-compressor keeps hold of the last one. Where there is a process group
        # its tensors lie in shared memory, of which a run would fill another model's worth at every step.
        with _quiet_llmcompressor():
            reset_session()
        gc.collect()


def _quantize_duplicate(
    duplicate: "PreTrainedModel",
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    scheme: QuantizationScheme,
    ignore: Collection[str],
    output_dir: str | os.PathLike[str],
) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    with new_directory(output_dir) as draft:
        _write_companions(model, tokenizer, draft)
        # llm-compressor looks its model up by name, on the hub unless the name is a directory: give it this one.
        model.config.save_pretrained(draft)
        duplicate.name_or_path = duplicate.config._name_or_path = str(draft)
        recipe = QuantizationModifier(targets="Linear", scheme=scheme.preset, ignore=list(ignore))
        with _quiet_llmcompressor():
            oneshot(model=duplicate, recipe=recipe)
            duplicate.save_pretrained(draft, save_compressed=True)


@contextlib.contextmanager
def _quiet_llmcompressor() -> Iterator[None]:
    """Keep its progress bars and its account of each stage out of a log that gets one checkpoint per step."""
    from llmcompressor.logger import LOGGER_CONFIG
    from loguru import logger

    # In a process with a process group (an engine makes one), oneshot configures its logger anew from this.
    wanted, LOGGER_CONFIG.disabled = LOGGER_CONFIG.disabled, True
    for package in ("llmcompressor", "compressed_tensors"):
        logger.disable(package)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            # Saving from host memory is what is wanted here.
            warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
            yield
    finally:
        LOGGER_CONFIG.disabled = wanted
        for package in ("llmcompressor", "compressed_tensors"):
            logger.enable(package)


def _duplicate(named_tensors: NamedTensors, model: "PreTrainedModel") -> "PreTrainedModel":
    """A copy of `model` in host memory that holds the given tensors, each in its own dtype."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        duplicate = type(model)(type(model.config).from_dict(model.config.to_dict()))
    state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named_tensors}
    duplicate.load_state_dict(state, strict=False, assign=True)
    duplicate.tie_weights()
    duplicate.generation_config = model.generation_config
    duplicate.config.architectures = model.config.architectures or [type(model).__name__]
    return duplicate.eval()


def _write_companions(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", directory: os.PathLike[str]
) -> None:
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
