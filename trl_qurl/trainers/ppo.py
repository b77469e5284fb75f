"""`QuRLPPOTrainer`: `QuRLGRPOTrainer` with a critic's advantages, one per token, in TRL's loss."""

import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState

from trl_qurl.advantages import (
    bootstrap_values,
    explained_variance,
    generalized_advantages,
    masked_moments,
    token_rewards,
    value_loss,
    weighted_sum,
    whiten,
)
from trl_qurl.config.ppo import QuRLPPOConfig
from trl_qurl.trainers.arguments import takes
from trl_qurl.trainers.callbacks import RolloutCallback
from trl_qurl.trainers.checks.critic import check_tokens
from trl_qurl.trainers.critic import CRITIC_DIRECTORY, Critic, load_critic_model
from trl_qurl.trainers.grpo import QuRLGRPOTrainer
from trl_qurl.trainers.scoring import Batch, learned_tokens


class QuRLPPOTrainer(QuRLGRPOTrainer):
    """Proximal policy optimization with a critic, on rollouts from a quantized copy of the policy.

    Args:
        model: This and all other arguments: see [`QuRLGRPOTrainer`].
        value_model: The critic's initial model: a name, a path, or a token classifier with one
            label, also with an adapter; `None` for the policy's initial model.

    Raises:
        TypeError: As for the parent, or `value_model` has no value per token.
        ValueError: As for the parent, or the critic's tokenizer differs from the policy's.
    """

    _config_class = QuRLPPOConfig
    _algorithm = "PPO"
    _tag_names = ["trl", "ppo", "qurl"]
    _learns_within_groups = False

    def __init__(
        self,
        *positional: Any,
        value_model: str | PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> None:
        self._value_model = value_model
        super().__init__(*positional, **kwargs)
        self.critic = Critic(self._value_model, self.args, self.accelerator)
        self.add_callback(CriticWarmupCallback())

    takes(QuRLGRPOTrainer.__init__)(__init__)  # no decorator: to editors, it would hide value_model

    def _checks(self, args: QuRLPPOConfig) -> list[RolloutCallback]:
        return [*super()._checks(args), CriticLoader()]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        batch = super()._generate_and_score_completions(inputs)
        started = time.perf_counter()
        if self._mode == "train":
            size = self.args.per_device_train_batch_size
        else:
            size = self.args.per_device_eval_batch_size
        values = self.critic.rollout_values(batch, size)  # (B, T + 1)
        self._record({"time/values_s": time.perf_counter() - started})
        self._add_advantages(batch, values)
        return batch

    def _total_rewards(self) -> torch.Tensor:
        """Return the weighted sums of this process's rewards, (B,), NaN without a reward."""
        totals = weighted_sum(self._rollout.rewards, self.reward_weights)  # of all processes
        parts = totals.tensor_split(self.accelerator.num_processes)
        return parts[self.accelerator.process_index]

    def _add_advantages(self, batch: Batch, values: torch.Tensor) -> None:
        """Replace the groups' advantages with the critic's, and add what the critic learns from."""
        rewards = self._total_rewards()
        mask = learned_tokens(batch) & ~rewards.isnan().unsqueeze(1)  # (B, T)
        # as TRL detects truncated completions
        ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        values_before = values[:, :-1]  # (B, T)
        advantages, returns = generalized_advantages(
            token_rewards(rewards, mask),
            values_before,
            bootstrap_values(values, batch["completion_ids"], batch["completion_mask"], ends),
            mask,
            self.args.gamma,
            self.args.gae_lambda,
        )
        spread = masked_moments(advantages, mask, self._sum_over_processes)
        targets = masked_moments(returns, mask, self._sum_over_processes)
        explained = explained_variance(values_before, returns, mask, self._sum_over_processes)
        metrics = {
            "critic/explained_variance": explained,
            "critic/returns_mean": targets.mean.item(),
            "critic/returns_std": targets.variance.sqrt().item(),
            "advantages/mean": spread.mean.item(),
            "advantages/std": spread.variance.sqrt().item(),
        }
        self._record(metrics)
        self._log_advantages(advantages, mask)
        batch["advantages"] = whiten(advantages, mask, spread)
        batch["values"] = values_before
        batch["returns"] = returns
        batch["critic_mask"] = mask

    def _log_advantages(self, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        """Replace the groups' advantages in the table of completions with means over the tokens."""
        means = advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        everywhere = self.accelerator.gather(means).tolist()
        logged = self._logs["advantages"]  # a deque
        for _ in everywhere[: len(logged)]:
            logged.pop()
        logged.extend(everywhere)
        if self.num_generations == 1:
            # always 1 for groups of one
            self._metrics[self._mode].pop("frac_reward_zero_std", None)

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the policy's loss, as the parent does, and 0 during the critic's warmup."""
        loss = super().compute_loss(*args, **kwargs)
        warmup = self.args.critic_warmup_steps
        if not self.model.training or self.state.global_step > warmup or warmup == 0:
            return loss
        if self.state.global_step < warmup:
            # DeepSpeed steps before `CriticWarmupCallback` clears the gradients.
            return loss * 0.0
        if self.is_deepspeed_enabled:
            # AdamW has counted those steps, which would change the size of the first real ones.
            self.optimizer.state.clear()
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the policy's forward and backward pass, then the critic's, which saves memory."""
        step = self._step  # TRL increments it
        loss = super().training_step(*args, **kwargs)
        batch = self._buffered_inputs[step % self.args.steps_per_generation]
        self.critic.backward(self._value_loss(batch, self.critic.values(batch)))
        if self.accelerator.sync_gradients:
            self._record({"critic/grad_norm": self.critic.step()})
        return loss

    def _value_loss(self, batch: Batch, values: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's share of the mean loss over an optimizer step's tokens.

        `values` is (B, T + 1), from `Critic.values`.
        """
        mask = batch["critic_mask"]
        loss, clipped = value_loss(
            values[:, :-1], batch["values"], batch["returns"], self.args.value_clip_range
        )
        summed = torch.where(mask, loss, 0.0).sum()
        clipped_tokens = (clipped & mask).sum().float()
        tokens = mask.sum().float()
        sums = self._sum_over_processes(torch.stack([summed.detach(), clipped_tokens, tokens]))
        total, clipped_count, count = sums.tolist()
        count = max(count, 1.0)
        self._record(
            {"critic/value_loss": total / count, "critic/value_clip_share": clipped_count / count}
        )
        # `num_items_in_batch` covers the whole rollout and all processes, as in the parent's
        # token-level losses.
        rollout_tokens = batch["num_items_in_batch"].clamp(min=1.0)
        steps = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        return summed * steps * self.accelerator.num_processes / rollout_tokens

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Create the policy's schedule, and the critic's optimizer at a constant learning rate."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self.critic.prepare(self._build_critic_optimizer)
        return scheduler

    def _build_critic_optimizer(self, critic: torch.nn.Module) -> Optimizer:
        """Build an optimizer like the policy's, with the critic's learning rate."""
        # `create_optimizer` stores its result in the trainer, which is why a copy calls it.
        # `get_optimizer_cls_and_kwargs` alone would leave out weight decay by group, and what
        # create_optimizer does for single optimizers and in a subclass.
        builder = copy.copy(self)
        builder.optimizer = None
        builder.args = copy.copy(self.args)
        builder.args.learning_rate = self.args.critic_learning_rate
        return builder.create_optimizer(critic)

    def _save_rest(self, checkpoint: Path) -> None:
        super()._save_rest(checkpoint)
        self.critic.save_state(checkpoint)

    def _load_rest(self, checkpoint: Path) -> None:
        super()._load_rest(checkpoint)
        self.critic.load_state(checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.critic.load_state(Path(self.state.best_model_checkpoint))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy as a transformers model, and the critic in its subdirectory `critic/`."""
        directory = Path(output_dir or self.args.output_dir)
        self.critic.save_pretrained(directory / CRITIC_DIRECTORY, self._tokenizer)
        super().save_model(output_dir, _internal_call)


class CriticLoader(RolloutCallback):
    """Callback that loads the critic before the policy, because a fault of it is found sooner."""

    def on_arguments(self, args: QuRLPPOConfig, arguments: dict[str, Any]) -> None:
        """Load the critic's initial model."""
        trainer = self.trainer
        trainer._value_model = load_critic_model(args, arguments["model"], trainer._value_model)

    def on_models(self) -> None:
        """Compare the critic's vocabulary with the policy's."""
        trainer = self.trainer
        check_tokens(trainer._value_model, trainer.model, trainer.processing_class)


class CriticWarmupCallback(TrainerCallback):
    """Callback that freezes the policy during the critic's warmup.

    The optimizer runs without gradients, so it changes no weights, builds no momentum and applies
    no weight decay (under DeepSpeed, it does apply it).
    """

    def on_pre_optimizer_step(
        self,
        args: QuRLPPOConfig,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: Optimizer,
        **kwargs: Any,
    ) -> None:
        """Clear the gradients."""
        if state.global_step < args.critic_warmup_steps:
            optimizer.zero_grad()
