"""What a trainer keeps on disk: checkpoints to resume from, models, their cards, the run log."""

import functools
import os
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import get_config_model_id

from trl_qurl.quantization.plan import Formats, format_name, make_plan, require_formats
from trl_qurl.quantization.storage import set_dtype
from trl_qurl.quantization.stream import WeightStream
from trl_qurl.rollout.backend import QuantizedVLLMGeneration
from trl_qurl.rollout.group import TOGETHER
from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.callbacks import RunLogCallback, SavingBetweenSteps
from trl_qurl.trainers.model_card import add_rollouts, quantized_card
from trl_qurl.trainers.resuming import (
    check_complete,
    check_loaded,
    check_split_weights,
    last_complete_checkpoint,
    load_policy,
    read_whole,
    warn_of_new_optimizer,
    written_whole,
)
from trl_qurl.trainers.saving import write_quantized

TRLTrainer: Any = object  # to mypy, which allows no `super()` into a protocol


class CheckpointsMixin(TRLTrainer):
    """Mixin for trainers on quantized rollouts: whole checkpoints, which are proven when loaded."""

    _algorithm: ClassVar[str]

    accelerator: Accelerator
    state: TrainerState
    vllm_generation: QuantizedVLLMGeneration
    _run_log: RunLogCallback
    _saving: SavingBetweenSteps

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as the parent does, while no other run may train with this output directory.

        `True` resumes from the last checkpoint that is complete.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(last_complete_checkpoint(self.args.output_dir))
        elif resume_from_checkpoint:
            resume_from_checkpoint = str(check_complete(resume_from_checkpoint))
        if resume_from_checkpoint and self.is_fsdp_enabled:
            check_split_weights(Path(resume_from_checkpoint))
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._run_log.close()

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        checkpoint = Path(self._get_output_dir(trial=trial), name)
        if self._saving.moves(checkpoint):
            return
        with written_whole(checkpoint, self.args.should_save):
            # Before transformers' last file, by which a checkpoint counts as complete.
            self._save_rollout(checkpoint)
            super()._save_checkpoint(model, trial)

    def _save_rollout(self, checkpoint: Path) -> None:
        """Add to a checkpoint what a resumed run needs besides transformers' own files."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoint = Path(resume_from_checkpoint)
        with read_whole(checkpoint):
            if self.is_fsdp_enabled or not load_policy(self.model, checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if is_sharded or not load_policy(self.model, best):
            super()._load_best_model()
        self._check_policy(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with read_whole(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # which have other files
            warn_of_new_optimizer(Path(checkpoint))
        self._check_policy(Path(checkpoint))

    def _check_policy(self, checkpoint: Path) -> None:
        """Raise `RuntimeError` unless the policy is the checkpoint's."""
        if self.is_deepspeed_enabled:  # ZeRO's checkpoints hold other tensors
            return
        policy = self.accelerator.unwrap_model(self.model)
        is_reader = self.is_world_process_zero()
        TOGETHER.run(lambda: check_loaded("policy", policy, checkpoint, is_reader))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole policy, as the parent does, to `output_dir` or the run's own directory."""
        whole: Any = nullcontext()
        if self.is_fsdp_enabled:  # the plugin's own type of state would save no sharded weights
            plugin = self.accelerator.state.fsdp_plugin
            whole = substitute(plugin, "state_dict_type", "FULL_STATE_DICT")
        with whole:
            super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            set_dtype(Path(output_dir or self.args.output_dir), self.vllm_generation.weights.grid)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, with a section about the rollouts."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            add_rollouts(self._algorithm, self.args, self.vllm_generation)

    def save_quantized(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        formats: Formats = None,
        *,
        ignore: Collection[str] | None = None,
        merge: bool = False,
    ) -> Path:
        """Write a quantized checkpoint of the current policy, without a critic; return its path.

        `vllm serve` loads it. In the rollouts' format it holds what the engine would be sent,
        smoothed as in the rollouts. An adapter is merged into the weights, unless rollouts kept it
        separate (`weight_sync="adapter"`): then it is in `adapter/`. With UAQ, the config records
        the scale. Unquantized weights keep their training dtype. Training can continue afterwards.
        In a distributed run, every process must call this.

        Args:
            output_dir: Directory to create; defaults to `{args.output_dir}-{formats}`, which
                `push_to_hub` does not upload. An existing quantized checkpoint is replaced once the
                new one is complete.
            formats: Name of a format, or names by pattern; defaults to the rollouts',
                `args.rollout_quantization`.
            ignore: Modules to keep in full precision; defaults to those of the rollouts,
                `args.quantization_ignore`.
            merge: Whether to merge an adapter that rollouts kept separate. With another format or
                other modules to ignore than the rollouts', it is always merged.

        Raises:
            ValueError: A format is missing or unknown, or as `make_plan` does.
            OSError: The directory holds something other than a quantized checkpoint, or cannot be
                written.
        """
        args = self.args
        if formats is None:
            formats = args.rollout_quantization
        formats = require_formats(formats, "formats")
        if ignore is None:
            ignore = args.quantization_ignore
        ignore = [ignore] if isinstance(ignore, str) else list(ignore)
        if output_dir is None:
            run = Path(args.output_dir).absolute()
            path = run.with_name(f"{run.name}-{format_name(formats)}")
        else:
            path = Path(output_dir)
        self._write_quantized(path, formats, ignore, merge)
        return path

    def _write_quantized(self, path: Path, formats: Any, ignore: list[str], merge: bool) -> None:
        args = self.args
        generation = self.vllm_generation
        weights = generation.weights
        route = generation.sync.route
        # As text, because the order of patterns matters.
        has_same_formats = str(formats) == str(args.rollout_quantization)
        is_rollouts = has_same_formats and ignore == args.quantization_ignore
        if not is_rollouts:
            # A new stream raises in every process or in none. It is not smoothed: nobody has seen
            # its activations.
            weights = WeightStream(generation.model, make_plan(generation.model, formats, ignore))
        is_separate = is_rollouts and not merge and not route.is_merged
        start = get_config_model_id(self.model.config)
        hub_name = self.hub_model_id or args.hub_model_id
        base = start if start and not Path(start).is_dir() else None
        card = functools.partial(quantized_card, path.name, weights.plan, hub_name, base)
        write_quantized(generation, path, weights, card, route if is_separate else None)
