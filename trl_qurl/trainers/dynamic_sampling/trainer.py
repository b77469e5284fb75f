"""`DynamicSamplingTrainer`: TRL's `GRPOTrainer` with batches filled by dynamic sampling.

The parent calls two methods to generate and score. If dynamic sampling has already filled the batch, these return its
completions and rewards.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from trl_qurl.rollout.substitution import substitute
from trl_qurl.trainers.dynamic_sampling.sampler import (
    Batch,
    DynamicSampler,
    PromptStream,
    RolloutFunctions,
    weighted_sum,
)

STATE_FILE = "dynamic_sampling_state.json"  # in a checkpoint: number of prompts drawn, the same in all processes


class DynamicSamplingTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] with dynamic sampling, as [`QuRLGRPOConfig`] sets it."""

    _filled: Batch | None = None
    _dynamic_sampler: DynamicSampler | None = None

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, **kwargs: Any) -> None:
        if args.dynamic_sampling:
            check_arguments({"reward_funcs": reward_funcs, **kwargs}, args.dynamic_sampling_reward)
        super().__init__(model, reward_funcs, args, **kwargs)
        if not args.dynamic_sampling:
            return
        if args.dynamic_sampling_reward is None:
            judge = functools.partial(weighted_sum, weights=self.reward_weights)
        else:
            index = self.reward_func_names.index(args.dynamic_sampling_reward)
            judge = functools.partial(torch.select, dim=1, index=index)
        prompts = PromptStream(self.train_dataset, args.seed)
        self._dynamic_sampler = DynamicSampler(self.num_generations, judge, prompts, self.accelerator)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self._dynamic_sampler is None or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        functions = RolloutFunctions(self._generate, self._calculate_rewards, self._take_extras)
        filled = self._dynamic_sampler.fill(inputs, functions)
        for name in {name for sample in filled.samples for name in sample.extras}:
            self._pending_extra_logs[name] = [sample.extras.get(name) for sample in filled.samples]
        for name, value in filled.metrics.items():
            self._metrics["train"][name].append(value)
        with substitute(self, "_filled", filled):
            return super()._generate_and_score_completions(filled.rows)

    def _generate(self, prompts: list) -> tuple:
        return super()._generate(prompts) if self._filled is None else self._filled.generated()

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._calculate_rewards(*args, **kwargs) if self._filled is None else self._filled.rewards

    def _take_extras(self) -> dict[str, list]:
        extras = dict(self._pending_extra_logs)
        self._pending_extra_logs.clear()
        return extras

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._dynamic_sampler is not None and self.args.should_save:
            checkpoint = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            tmp = checkpoint / f".{STATE_FILE}"
            tmp.write_text(json.dumps({"prompts_drawn": self._dynamic_sampler.prompts.drawn}))
            tmp.replace(checkpoint / STATE_FILE)  # readers never see a partial file

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._dynamic_sampler is not None and checkpoint is not None:
            state = Path(checkpoint, STATE_FILE)
            if state.exists():  # missing if dynamic sampling was turned on at resume
                self._dynamic_sampler.prompts.drawn = json.loads(state.read_text())["prompts_drawn"]


def check_arguments(arguments: dict[str, Any], reward_name: str | None) -> None:
    """Raise `ValueError` for trainer arguments that dynamic sampling does not support, before an engine starts."""
    PromptStream(arguments.get("train_dataset"), seed=0)
    for name in ("tools", "rollout_func", "environment_factory"):
        if arguments.get(name):
            raise ValueError(f"dynamic_sampling=True does not work with {name}: remove one of them.")
    if {"image", "images"} & set(getattr(arguments["train_dataset"], "column_names", None) or ()):
        raise ValueError("dynamic_sampling=True does not work with images: set it to False.")
    functions = arguments["reward_funcs"]
    functions = functions if isinstance(functions, list) else [functions]
    names = [getattr(function, "__name__", None) for function in functions]
    if reward_name is not None and None not in names and reward_name not in names:
        raise ValueError(
            f"dynamic_sampling_reward={reward_name!r} is not the name of a reward function: use one of "
            f"{', '.join(map(repr, names))}."
        )
