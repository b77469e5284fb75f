"""`DynamicSamplingTrainer`: TRL's `GRPOTrainer` on batches that dynamic sampling fills.

The parent generates and scores as ever. Where dynamic sampling has done both already, the two methods it calls for it
answer with what was kept.
"""

from typing import Any

import torch
from trl import GRPOTrainer

from trl_qurl.trainers.dynamic_sampling import DynamicSampler, FilledBatch, weighted_sum
from trl_qurl.trainers.prompt_stream import PromptStream


class DynamicSamplingTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that replaces groups whose rewards are all equal, if `args.dynamic_sampling` says so.

    `args` needs the fields of [`DynamicSamplingSettings`].

    Raises:
        ValueError: Arguments that dynamic sampling cannot work with.
    """

    def __init__(self, **arguments: Any) -> None:
        self._filled: FilledBatch | None = None
        self._dynamic_sampler: DynamicSampler | None = None
        config = arguments["args"]
        if config.dynamic_sampling:
            check_arguments(arguments, config.dynamic_sampling_reward)
        super().__init__(**arguments)
        if config.dynamic_sampling:
            self._dynamic_sampler = self._make_dynamic_sampler()

    @property
    def prompts_drawn(self) -> int:
        """Prompts drawn for replacement so far; what a checkpoint keeps."""
        return 0 if self._dynamic_sampler is None else self._dynamic_sampler.prompts.drawn

    @prompts_drawn.setter
    def prompts_drawn(self, drawn: int) -> None:
        if self._dynamic_sampler is not None:
            self._dynamic_sampler.prompts.drawn = drawn

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self._dynamic_sampler is None or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        filled = self._dynamic_sampler.fill(inputs)
        for name in {name for sample in filled.samples for name in sample.extras}:
            self._pending_extra_logs[name] = [sample.extras.get(name) for sample in filled.samples]
        for name, value in filled.metrics.items():
            self._metrics["train"][name].append(value)
        self._filled = filled
        batch = super()._generate_and_score_completions(filled.rows)
        self._filled = None
        return batch

    def _generate(self, prompts: list) -> tuple:
        return super()._generate(prompts) if self._filled is None else self._filled.generated()

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super()._calculate_rewards(*args, **kwargs) if self._filled is None else self._filled.rewards

    def _make_dynamic_sampler(self) -> DynamicSampler:
        name = self.args.dynamic_sampling_reward

        def judge(rewards: torch.Tensor) -> torch.Tensor:
            if name is None:
                return weighted_sum(rewards, self.reward_weights)
            return rewards[:, self.reward_func_names.index(name)]

        def take_extras() -> dict[str, list]:
            taken = dict(self._pending_extra_logs)
            self._pending_extra_logs.clear()
            return taken

        return DynamicSampler(
            self.num_generations,
            self.args.dynamic_sampling_max_rounds,
            judge,
            PromptStream(self.train_dataset, self.args.seed),
            self.accelerator,
            self._generate,
            self._calculate_rewards,
            take_extras,
        )


def check_arguments(arguments: dict[str, Any], reward_name: str | None) -> None:
    """
    Refuse what dynamic sampling cannot work with, before an engine starts.

    Args:
        arguments: The trainer's, by name.
        reward_name: Of the reward function that decides; `None` for the weighted sum.

    Raises:
        ValueError: A streamed data set, tools, environments, images, a rollout function of the user's, or no reward
            function of that name.
    """
    PromptStream(arguments.get("train_dataset"), seed=0)
    for name in ("tools", "rollout_func", "environment_factory"):
        if arguments.get(name):
            raise ValueError(
                f"dynamic_sampling=True generates for further prompts by itself, which does not go together with "
                f"{name}: leave one of them out."
            )
    if {"image", "images"} & set(getattr(arguments["train_dataset"], "column_names", None) or ()):
        raise ValueError("dynamic_sampling=True handles text only, and the data set has images: set it to False.")
    functions = arguments["reward_funcs"]
    functions = functions if isinstance(functions, list) else [functions]
    names = [getattr(function, "__name__", None) for function in functions]
    if reward_name is not None and None not in names and reward_name not in names:
        raise ValueError(
            f"dynamic_sampling_reward={reward_name!r} is not the name of a reward function; they are called "
            f"{', '.join(map(repr, names))}."
        )
