"""Saving the trained policy: as a whole model, as a quantized checkpoint for `vllm serve`, and with model cards.

For a quantized checkpoint, parameters come from the same source as for a sync (TRL's backend, which gathers FSDP and
ZeRO-3 shards and merges adapters temporarily) and go to the writer behind `trl-qurl quantize`. The engine and its
weights are not touched.
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
from trl_qurl.rollout.adapter import FrozenBase, adapter_rank, adapter_tensors, engine_rank, write_adapter
from trl_qurl.trainers.model_card import add_citation, describe_run, name_local_models, quantized_card

if TYPE_CHECKING:
    from trl import GRPOTrainer as TRLTrainer
else:
    TRLTrainer = object

ADAPTER_DIRECTORY = "adapter"  # subdirectory of a quantized checkpoint

# Fields of TRL's config that model cards list.
CARD_FIELDS = ("learning_rate", "num_generations", "max_completion_length", "temperature", "beta", "vllm_mode", "seed")


class SavingMixin(TRLTrainer):
    """Mixin for TRL trainers with quantized rollouts: saves policies, quantized checkpoints and model cards."""

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
        """Write a quantized checkpoint of the current policy, without a critic, for `vllm serve DIRECTORY`.

        No calibration data is needed. PEFT adapters are merged into the weights. If rollouts kept the adapter separate
        from the quantized base (`weight_sync="adapter"`), so does the checkpoint, in its subdirectory `adapter`.
        Weights rescaled by UAQ compute the same function, and the config records the scale. Unquantized weights keep
        their training dtype. Training can continue afterwards. In a distributed run, every process must call this.

        Args:
            output_dir: Directory to create; defaults to `{args.output_dir}-{scheme}`, which `push_to_hub` does not
                upload. An existing quantized checkpoint is replaced once the new one is complete.
            scheme: Name of a format; defaults to the rollouts' format, `args.rollout_quantization`.
            ignore: Modules to keep in full precision; defaults to those of the rollouts, `args.quantization_ignore`.
            quantizer: `"streaming"` or `"llmcompressor"`. Both produce the same codes and scales, but llm-compressor
                needs a second copy of the model in host memory.
            merge: Whether to merge an adapter into the weights; defaults to what the rollouts did.

        Returns:
            The checkpoint directory.

        Raises:
            ValueError: The scheme or quantizer is missing or unknown, no layer is left to quantize, llm-compressor is
                used with several processes, the checkpoint would replace the run, or `merge=False` is combined with
                settings other than the rollouts' or with rollouts that did not keep the adapter separate.
            ImportError: `quantizer="llmcompressor"`, but llm-compressor is not installed.
            FileExistsError: The directory holds something other than a quantized checkpoint.
            OSError: The checkpoint cannot be written; no partial checkpoint remains.
            RuntimeError: In the other processes, if the main process failed.
        """
        generation = self.vllm_generation
        name = scheme or self.args.rollout_quantization
        if name is None:
            raise ValueError(
                "This run's rollouts are not quantized (rollout_quantization=None): pass "
                f"save_quantized(scheme=...) one of {', '.join(map(repr, SCHEMES))}."
            )
        target = get_scheme(name)
        check_quantizer(quantizer)
        if quantizer == "llmcompressor" and self.accelerator.num_processes > 1:
            raise ValueError(
                f"quantizer='llmcompressor' needs one process, but this run has {self.accelerator.num_processes}: "
                "use 'streaming', which produces the same codes and scales."
            )
        ignore = self.args.quantization_ignore if ignore is None else list(ignore)
        quantized_layer_names(generation.model, ignore, target)  # raises in every process or in none
        run = Path(self.args.output_dir).absolute()
        path = run.with_name(f"{run.name}-{target.name}") if output_dir is None else Path(output_dir)
        self._by_main_process(lambda: check_place(path, run))
        matches_rollouts = (target.name, list(ignore), quantizer) == (
            self.args.rollout_quantization,
            list(self.args.quantization_ignore),
            "streaming",
        )
        if merge is False and (generation.base is None or not matches_rollouts):
            raise ValueError(
                "merge=False keeps the adapter separate from the rollouts' base: it requires weight_sync='adapter', "
                "the rollouts' format and ignored modules, and quantizer='streaming'."
            )
        if not merge and generation.base is not None and matches_rollouts:
            self._save_with_adapter(generation.base, path, target)
            return path
        parameters = generation.policy_parameters()

        def write() -> None:
            writer = CheckpointWriter(generation.base_model, self.processing_class, target, ignore)
            writer.quantize(parameters, path, quantizer)
            self._quantized_card(path.name, target, ignore).save(path / "README.md")

        with exact_base(generation.model):
            self._by_main_process(write, parameters)
        return path

    def _save_with_adapter(self, base: FrozenBase, path: Path, scheme: QuantizationScheme) -> None:
        generation, ignore = self.vllm_generation, list(self.args.quantization_ignore)
        tensors, adapter = base.quantized_tensors(), adapter_tensors(generation.model)

        def write() -> None:
            def add_adapter(tmp: Path) -> None:
                write_adapter(generation.model, adapter, tmp / ADAPTER_DIRECTORY)
                rank = engine_rank(adapter_rank(generation.model))
                self._quantized_card(path.name, scheme, ignore, rank).save(tmp / "README.md")

            writer = CheckpointWriter(generation.base_model, self.processing_class, scheme, ignore)
            writer.write(tensors, path, add_adapter)

        self._by_main_process(write, itertools.chain(tensors, adapter))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole policy, as the parent does.

        With sharded FSDP checkpoints (`SHARDED_STATE_DICT`), the parent would not write any weights, so this call
        temporarily switches to `FULL_STATE_DICT`. Every process must call it.

        Args:
            output_dir: Directory; defaults to the run's output directory.

        Raises:
            OSError: The parent did not write weights that can be loaded.
        """
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        state_dict_type = plugin and plugin.state_dict_type
        if plugin is not None:
            plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            if plugin is not None:
                plugin.set_state_dict_type(state_dict_type)
        # An `_internal_call` saves a checkpoint to resume from, which may be in DeepSpeed's own format.
        if self.args.should_save and not _internal_call:
            check_weights(Path(output_dir or self.args.output_dir))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, with a section about the rollouts."""
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
        """Return sentences and settings for the model card; each trainer adds those of its algorithm."""
        args, name = self.args, self.args.rollout_quantization
        rollouts = (
            "The rollouts were not quantized: vLLM generated from the policy in its own dtype."
            if name is None
            else f"The rollouts came from a quantized copy of the policy ({get_scheme(name).description}), updated "
            "before each generation and run by vLLM. The policy was trained and saved in full precision."
        )
        if self.vllm_generation.base is not None:
            base = "in its own dtype" if name is None else f"quantized once ({get_scheme(name).description})"
            rollouts = f"The rollouts came from the frozen base, {base}, with the unmerged adapter, run by vLLM."
        if args.round_base:
            rollouts += (
                " The adapter was trained on a base whose weights were rounded to the values of these codes, and only "
                "works with that base: on the original weights, or merged into them, it is a different policy."
            )
        settings = {
            "`rollout_quantization`": name,
            "`quantization_ignore`": ", ".join(args.quantization_ignore) or "none",
            "`weight_sync`, `round_base`": f"{args.weight_sync}, {args.round_base}",
            "UAQ's s (`uaq_scale`)": recorded_scale(self.model),
            "updates per rollout": f"{args.updates_per_rollout:g}",
        }
        settings |= {f"`{name}`": getattr(args, name) for name in CARD_FIELDS}
        return [f"The algorithm is {self._algorithm}.", rollouts], settings

    def _quantized_card(
        self, name: str, scheme: QuantizationScheme, ignore: list[str], adapter_rank: int = 0
    ) -> ModelCard:
        start = get_config_model_id(self.model.config)
        start = None if not start or Path(start).is_dir() else start
        pushed = self.hub_model_id or self.args.hub_model_id
        return quantized_card(name, scheme, ignore, pushed, start, self._tag_names, adapter_rank)

    def _by_main_process(self, act: Callable[[], None], parameters: Iterable[Any] = ()) -> None:
        """Run `act` in the main process, and raise everywhere if it fails; all processes exhaust `parameters`."""
        error: Exception | None = None
        try:
            if self.accelerator.is_main_process:
                act()
        except Exception as failure:
            error = failure
        finally:
            # Gathering is collective, and the end of the iterator unmerges adapters.
            deque(parameters, maxlen=0)
        outcome = [None if error is None else f"{type(error).__name__}: {error}"]
        broadcast_object_list(outcome, from_process=0)
        if error is not None:
            raise error
        if outcome[0] is not None:
            raise RuntimeError(f"The main process could not save the quantized checkpoint. {outcome[0]}")


def check_weights(directory: Path) -> None:
    """Raise `OSError` unless a saved policy or adapter has weights that can be read."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise OSError(
            f"No weights were written to {directory}. With DeepSpeed, set zero3_save_16bit_model: true in "
            "accelerate's configuration; the run's last checkpoint still holds them in DeepSpeed's own format."
        )
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise OSError(f"{file} cannot be read ({error}): save the policy again.") from None


def check_place(path: Path, run: Path) -> None:
    """Raise if a checkpoint at `path` would replace the run's output directory or anything else of value."""
    if path.resolve() in (run.resolve(), *run.resolve().parents):
        raise ValueError(f"{path} holds this run and would be replaced: choose another, such as {run}-quantized.")
    check_replaceable(path)


@contextmanager
def exact_base(model: torch.nn.Module) -> Iterator[None]:
    """Restore the base weights of adapters on exit, from a copy in host memory, because merging rounds them."""
    weights = [parameter.detach() for name, parameter in model.named_parameters() if ".base_layer." in name]
    weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    copies = [weight.to("cpu", copy=True) for weight in weights]
    try:
        yield
    finally:
        for weight, copy in zip(weights, copies, strict=True):
            weight.copy_(copy)
