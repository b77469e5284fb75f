"""Whole quantized checkpoints: weights, config and tokenizer, as vLLM loads them.

llm-compressor is the reference for every format. Our stream writes the same tensors without it (pip
cannot install it beside vLLM) and without a second model in memory. Only this file imports
llm-compressor.
"""

import contextlib
import gc
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm.auto import tqdm

from trl_qurl.quantization.checkpoint_form import NamedTensors
from trl_qurl.quantization.checks.output import check_replaceable
from trl_qurl.quantization.files import new_directory
from trl_qurl.quantization.merging import model_parameters
from trl_qurl.quantization.plan import Formats, QuantizationPlan, make_plan, require_formats
from trl_qurl.quantization.storage import write_config, write_tensors
from trl_qurl.quantization.stream import WeightStream

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def write_checkpoint(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    formats: Formats,
    output_dir: str | os.PathLike[str],
    *,
    ignore: Sequence[str] = ("lm_head",),
) -> None:
    """Write a quantized checkpoint of a model, ready for `vllm serve`.

    No calibration data is needed.

    Args:
        model: Full-precision model. Not modified.
        tokenizer: Saved beside the weights, unless `None`.
        formats: Name of a format, one of `SCHEMES`, or names by pattern (`make_plan`).
        output_dir: Directory to create; an earlier quantized checkpoint is replaced once the new
            one is complete.
        ignore: Modules kept in full precision, in llm-compressor's pattern syntax.

    Raises:
        ValueError: If a format is unknown, or as `make_plan` does.
        FileExistsError: If the directory holds something other than a quantized checkpoint.
        OSError: If the directory cannot be written; nothing is left behind.
    """
    plan = make_plan(model, require_formats(formats, "formats"), ignore)
    check_replaceable(output_dir)
    parameters = tqdm(list(model_parameters(model)), "Rounding", disable=None)
    tensors = WeightStream(model, plan).tensors(parameters)
    CheckpointWriter(model, tokenizer, plan).write(tensors, output_dir)


def load_model(
    name_or_path: str, trust_remote_code: bool = False
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model with the architecture in its config, and its tokenizer.

    A model that accepts images has a processor instead.
    """
    import transformers

    trust = {"trust_remote_code": trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(name_or_path, **trust)
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{name_or_path} is quantized already: give the policy in full precision, as "
            "trainer.save_model() writes it."
        )
    model_class = transformers.AutoModelForCausalLM
    if config.architectures:
        model_class = getattr(transformers, config.architectures[0], model_class)
    tokenizer_class = transformers.AutoTokenizer
    if getattr(config, "vision_config", None) is not None:
        tokenizer_class = transformers.AutoProcessor
    model = model_class.from_pretrained(name_or_path, dtype="auto", **trust)
    return model, tokenizer_class.from_pretrained(name_or_path, **trust)


@dataclass(frozen=True)
class CheckpointWriter:
    """Writer for checkpoints of one model by one plan; an empty plan quantizes nothing."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    plan: QuantizationPlan

    def write(
        self,
        named_tensors: NamedTensors,
        output_dir: str | os.PathLike[str],
        write_beside: Callable[[Path], None] | None = None,
    ) -> None:
        """Write tensors that are already in checkpoint format.

        `write_beside` adds other files to the directory.
        """
        with new_directory(output_dir) as tmp:
            write_tensors(named_tensors, tmp)
            if self.model.generation_config is not None:
                self.model.generation_config.save_pretrained(tmp)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(tmp)
            write_config(self.model, tmp, self.plan.quantization_config())
            if write_beside is not None:
                write_beside(tmp)

    def write_with_llmcompressor(
        self, copies: dict[str, torch.Tensor], output_dir: str | os.PathLike[str]
    ) -> None:
        """Quantize copies of all parameters with llm-compressor, and write the result.

        They are in host memory, and become another model.
        """
        from llmcompressor import reset_session

        try:
            self._run_llmcompressor(_duplicate(copies, self.model), output_dir)
        finally:
            # llm-compressor keeps its last model in reference cycles, and every step of a run would
            # add another one.
            with _quiet_llmcompressor():
                reset_session()
            gc.collect()

    def _run_llmcompressor(
        self, duplicate: "PreTrainedModel", output_dir: str | os.PathLike[str]
    ) -> None:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier

        presets = {scheme.preset: list(targets) for scheme, targets in self.plan.targets.items()}
        with new_directory(output_dir) as tmp:
            # llm-compressor looks up its model by name, on the Hub unless the name is a directory,
            # so point it here.
            self.model.config.save_pretrained(tmp)
            duplicate.name_or_path = str(tmp)
            duplicate.config._name_or_path = str(tmp)
            recipe = QuantizationModifier(scheme=presets, ignore=list(self.plan.ignore))
            with _quiet_llmcompressor():
                oneshot(model=duplicate, recipe=recipe)
                duplicate.save_pretrained(tmp, save_compressed=True)


@contextlib.contextmanager
def _quiet_llmcompressor() -> Iterator[None]:
    """Hide its progress bars and messages, which it would otherwise repeat at every step."""
    from loguru import logger

    for package in ("llmcompressor", "compressed_tensors"):
        logger.disable(package)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for package in ("llmcompressor", "compressed_tensors"):
            logger.enable(package)


def _duplicate(copies: dict[str, torch.Tensor], model: "PreTrainedModel") -> "PreTrainedModel":
    """Return a model like `model` with these parameters, each in its own dtype."""
    from transformers.initialization import no_init_weights

    config = type(model.config).from_dict(model.config.to_dict())
    # llm-compressor creates experts in this dtype.
    config.get_text_config().dtype = model.dtype
    with no_init_weights():
        duplicate = type(model)(config)
    duplicate.load_state_dict(copies, strict=False, assign=True)
    duplicate.tie_weights()
    return duplicate.eval()
