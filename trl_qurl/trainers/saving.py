"""The trained policy on disk: whole, as a quantized checkpoint ready for `vllm serve`, and its model cards.

For a quantized checkpoint, parameters come from where every sync gets them (TRL's backend: FSDP and ZeRO-3 gather,
adapters are merged and come out again) and go to the writer behind `trl-qurl quantize`. The engine and its weights are
not touched.
"""

import itertools
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list
from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from trl.trainer.utils import get_config_model_id

from trl_qurl.quantization.checkpoint import CheckpointWriter, check_quantizer
from trl_qurl.quantization.formats import SCHEMES, get_scheme
from trl_qurl.quantization.layers import quantized_layer_names
from trl_qurl.quantization.scheme import QuantizationScheme
from trl_qurl.quantization.storage import check_replaceable
from trl_qurl.quantization.uaq import recorded_scale
from trl_qurl.rollout.adapter import adapter_rank, adapter_tensors, engine_rank, write_adapter
from trl_qurl.rollout.base import FrozenBase
from trl_qurl.trainers.model_card import add_citation, describe_run, name_local_models, quantized_card

if TYPE_CHECKING:
    from trl import GRPOTrainer as TRLTrainer
else:
    TRLTrainer = object

ADAPTER_DIRECTORY = "adapter"  # in a quantized checkpoint

# Fields of TRL's config that a model card shows.
SHOWN = ("learning_rate", "num_generations", "max_completion_length", "temperature", "beta", "vllm_mode", "seed")


class SavingMixin(TRLTrainer):
    """A mixin for a trainer of TRL on quantized rollouts: it saves policies, quantized checkpoints, model cards."""

    _algorithm: ClassVar[str]
    _algorithm_citation: ClassVar[str] = ""

    def save_quantized(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        scheme: str | None = None,
        *,
        ignore: Collection[str] | None = None,
        quantizer: str = "streaming",
        merge: bool | None = None,
    ) -> Path:
        """Write a quantized checkpoint of the policy as it is now, without a critic, for `vllm serve DIRECTORY`.

        No calibration data is needed. With PEFT the merged weights are written; where rollouts had the adapter beside
        the quantized base (`weight_sync="adapter"`), so has the checkpoint, in its subdirectory `adapter`. Weights
        that UAQ has rescaled compute the same function, and the config keeps the scale. Weights that are not quantized
        keep the dtype they are trained in. Training can go on afterwards. In a run of several processes, all of them
        must call it.

        Args:
            output_dir: Directory to create, by default `{args.output_dir}-{scheme}`, which `push_to_hub` does not
                upload. An earlier quantized checkpoint is replaced once the new one is complete.
            scheme: Name of a format; by default that of the rollouts, `args.rollout_quantization`.
            ignore: Modules kept in full precision; by default those of the rollouts, `args.quantization_ignore`.
            quantizer: `"streaming"`, or `"llmcompressor"`: the same codes and scales from llm-compressor, which takes
                a second copy of the model in host memory.
            merge: Whether an adapter is merged into the weights; by default as the rollouts had it. After a
                fallback to 16 bits (`mismatch_guard`) it is.

        Returns:
            The directory.

        Raises:
            ValueError: No scheme, an unknown scheme or quantizer, nothing left to quantize, llm-compressor in several
                processes, the run's own directory, or `merge=False` with another format or quantizer than the
                rollouts', or without an adapter that is sent by itself.
            ImportError: `quantizer="llmcompressor"` without llm-compressor.
            FileExistsError: The directory holds something else than a quantized checkpoint.
            OSError: It cannot be written; nothing is left behind.
            RuntimeError: In the other processes, if the main one failed.
        """
        generation = self.vllm_generation
        name = scheme or self.args.rollout_quantization
        if name is None:
            raise ValueError(
                "This run's rollouts are not quantized (rollout_quantization=None): name a format, as in "
                f"save_quantized(scheme=...), of {', '.join(map(repr, SCHEMES))}."
            )
        chosen = get_scheme(name)
        check_quantizer(quantizer)
        if quantizer == "llmcompressor" and self.accelerator.num_processes > 1:
            raise ValueError(
                f"quantizer='llmcompressor' works in one process, and this run has {self.accelerator.num_processes}: "
                "use 'streaming', which makes the same codes and scales."
            )
        ignore = self.args.quantization_ignore if ignore is None else list(ignore)
        quantized_layer_names(generation.model, ignore, chosen)  # refused in every process, or in none
        run = Path(self.args.output_dir).absolute()
        path = run.with_name(f"{run.name}-{chosen.name}") if output_dir is None else Path(output_dir)
        self._by_main_process(lambda: check_place(path, run))
        held = generation.rollout.scheme  # none after a fallback to 16 bits
        same = (chosen.name, list(ignore), quantizer) == (
            held and held.name,
            list(self.args.quantization_ignore),
            "streaming",
        )
        if merge is False and (generation.base is None or not same):
            raise ValueError(
                "merge=False keeps an adapter beside the base that rollouts used: it needs weight_sync='adapter', the "
                "rollouts' format and ignored modules, and quantizer='streaming'."
            )
        if not merge and generation.base is not None and same:
            self._save_beside_adapter(generation.base, path, chosen)
            return path
        parameters = generation.policy_parameters()

        def write() -> None:
            writer = CheckpointWriter(generation.base_model, self.processing_class, chosen, ignore)
            writer.quantize(parameters, path, quantizer)
            self._quantized_card(path.name, chosen, ignore).save(path / "README.md")

        with exact_base(generation.model):
            self._by_main_process(write, parameters)
        return path

    def _save_beside_adapter(self, base: FrozenBase, path: Path, scheme: QuantizationScheme) -> None:
        generation, ignore = self.vllm_generation, list(self.args.quantization_ignore)
        tensors, adapter = base.tensors(), adapter_tensors(generation.model)

        def write() -> None:
            def write_beside(draft: Path) -> None:
                write_adapter(generation.model, adapter, draft / ADAPTER_DIRECTORY)
                rank = engine_rank(adapter_rank(generation.model))
                self._quantized_card(path.name, scheme, ignore, rank).save(draft / "README.md")

            writer = CheckpointWriter(generation.base_model, self.processing_class, scheme, ignore)
            writer.write(tensors, path, write_beside)

        self._by_main_process(write, itertools.chain(tensors, adapter))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole policy, as the parent does.

        Where FSDP keeps checkpoints in shards (`SHARDED_STATE_DICT`), the parent writes no weights at all, so it is
        told otherwise for the length of this call. A collective operation.

        Args:
            output_dir: Directory; the run's own by default.

        Raises:
            OSError: Nothing was written that can be loaded.
        """
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        chosen = plugin and plugin.state_dict_type
        if plugin is not None:
            plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            if plugin is not None:
                plugin.set_state_dict_type(chosen)
        if (
            self.args.should_save and not _internal_call
        ):  # a checkpoint to resume from may be in DeepSpeed's own format
            check_weights(Path(output_dir or self.args.output_dir))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, with how the rollouts were made."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            path = Path(self.args.output_dir) / "README.md"
            card = ModelCard.load(path)
            name_local_models(card, Path(get_config_model_id(self.model.config)).name, path.resolve().parent.name)
            describe_run(card, *self._describe_run())
            if self._algorithm_citation:
                add_citation(card, self._algorithm, self._algorithm_citation)
            card.save(path)

    def _describe_run(self) -> tuple[list[str], dict[str, object]]:
        """Sentences and settings of the run for its model card; a trainer adds what its algorithm has."""
        args, name = self.args, self.args.rollout_quantization
        rollouts = (
            "The rollouts were not quantized: vLLM generated from the policy in its own dtype."
            if name is None
            else f"The rollouts came from a quantized copy of the policy ({get_scheme(name).description}), made again "
            "before each generation and run by vLLM; the policy was trained, and is saved here, in full precision."
        )
        if self.vllm_generation.base is not None:
            of = "in its own dtype" if name is None else f"quantized once ({get_scheme(name).description})"
            rollouts = f"The rollouts came from the frozen base {of}, with the adapter beside it, run by vLLM."
        if name is not None and self.vllm_generation.rollout.scheme is None:
            rollouts += " Then their mismatch was too large, and the last ones were not quantized (`mismatch_guard`)."
        if args.round_base:
            rollouts += (
                " The adapter was trained on a base whose weights were rounded to what these codes stand for, and "
                "belongs to it: on the original weights, or merged into them, it makes another policy."
            )
        if args.training_forward == "quantized":
            rollouts += f" Training computed its forward pass as vLLM does: what was trained is the {name} policy."
            if not args.round_base:
                rollouts += f" Quantize these weights to use it: `trl-qurl quantize MODEL OUT --scheme {name}`."
        settings = {
            "`rollout_quantization`": name,
            "`quantization_ignore`": ", ".join(args.quantization_ignore) or "none",
            "`training_forward`": args.training_forward,
            "`weight_sync`, `round_base`": f"{args.weight_sync}, {args.round_base}",
            "UAQ's s (`uaq_scale`)": recorded_scale(self.model),
            "updates per rollout": f"{args.updates_per_rollout:g}",
        }
        settings |= {f"`{name}`": getattr(args, name) for name in SHOWN}
        return [f"The algorithm is {self._algorithm}.", rollouts], settings

    def _quantized_card(
        self, name: str, scheme: QuantizationScheme, ignore: list[str], adapter_rank: int = 0
    ) -> ModelCard:
        start = get_config_model_id(self.model.config)
        start = None if not start or Path(start).is_dir() else start
        pushed = self.hub_model_id or self.args.hub_model_id
        return quantized_card(name, scheme, ignore, pushed, start, self._tag_names, adapter_rank)

    def _by_main_process(self, act: Callable[[], None], parameters: Iterable[Any] = ()) -> None:
        """Let the main process act; if it fails, all processes raise. All go through `parameters` in any case."""
        error: Exception | None = None
        try:
            if self.accelerator.is_main_process:
                act()
        except Exception as failure:
            error = failure
        finally:
            # Gathering takes every process, and at the end adapters come out.
            deque(parameters, maxlen=0)
        outcome = [None if error is None else f"{type(error).__name__}: {error}"]
        broadcast_object_list(outcome, from_process=0)
        if error is not None:
            raise error
        if outcome[0] is not None:
            raise RuntimeError(f"The main process could not save the quantized checkpoint. {outcome[0]}")


def check_weights(directory: Path) -> None:
    """Raise `OSError` if a directory that a policy or an adapter was saved to holds no weights that can be read."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise OSError(
            f"No weights were written to {directory}. With DeepSpeed, set zero3_save_16bit_model: true in "
            "accelerate's configuration; the last checkpoint of the run still holds them in its own format."
        )
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise OSError(f"{file} cannot be read ({error}): save the policy again.") from None


def check_place(path: Path, run: Path) -> None:
    """Refuse a path for the checkpoint that would replace the run in `output_dir`, or anything else of value."""
    if path.resolve() in (run.resolve(), *run.resolve().parents):
        raise ValueError(f"{path} holds this run and would be replaced: name another, such as {run}-quantized.")
    check_replaceable(path)


@contextmanager
def exact_base(model: torch.nn.Module) -> Iterator[None]:
    """Restore the weights below adapters after the block, from a copy in host memory: merging rounds them."""
    below = [parameter.detach() for name, parameter in model.named_parameters() if ".base_layer." in name]
    below = [part.to_local() if isinstance(part, DTensor) else part for part in below]
    kept = [part.to("cpu", copy=True) for part in below]
    try:
        yield
    finally:
        for part, bits in zip(below, kept, strict=True):
            part.copy_(bits)
