"""`QuRLPPOTrainer`: `QuRLGRPOTrainer` with the advantages of a critic, one per token, in TRL's
loss.
"""

import copy
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from trl_qurl.advantages import (
    bootstrap_values,
    explained_variance,
    generalized_advantages,
    masked_moments,
    token_rewards,
    value_loss,
    whiten,
)
from trl_qurl.config import QuRLPPOConfig
from trl_qurl.trainers.critic import (
    CRITIC_DIRECTORY,
    Critic,
    check_critic_vocabulary,
    load_critic_model,
)
from trl_qurl.trainers.dynamic_sampling import weighted_sum
from trl_qurl.trainers.grpo import QuRLGRPOTrainer
from trl_qurl.trainers.resuming import read_whole
from trl_qurl.trainers.scoring import learned_tokens

if TYPE_CHECKING:
    from peft import PeftConfig


class QuRLPPOTrainer(QuRLGRPOTrainer):
    """Proximal policy optimization with a critic, on rollouts from an actor: a quantized copy of
    the policy.

    Args:
        model: This and all other arguments: see [`QuRLGRPOTrainer`].
        value_model: The critic's initial model: a name, a path, or a token classifier with one
            label; `None` for the policy's initial model.
        value_peft_config: PEFT config for a critic that trains only an adapter and its head.

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
        model: Any,
        reward_funcs: Any = None,
        args: QuRLPPOConfig | None = None,
        *positional: Any,
        value_model: str | PreTrainedModel | None = None,
        value_peft_config: "PeftConfig | None" = None,
        **kwargs: Any,
    ) -> None:
        self._value_model, self._value_peft_config = value_model, value_peft_config
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self.critic = Critic(self._value_model, self.args, self.accelerator)
        self.add_callback(CriticWarmupCallback())

    def _before_engine(self, args: Any, arguments: dict[str, Any]) -> None:
        super()._before_engine(args, arguments)
        models = arguments["model"], self._value_model
        tokenizer = arguments.get("processing_class")
        self._value_model = load_critic_model(args, *models, tokenizer, self._value_peft_config)

    def _before_start(self) -> None:
        super()._before_start()
        check_critic_vocabulary(self._value_model, self.model, self._tokenizer)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        started = time.perf_counter()
        size = getattr(self.args, f"per_device_{self._mode}_batch_size")
        values = self.critic.rollout_values(batch, size)  # (B, T + 1)
        self._record({"time/values_s": time.perf_counter() - started})
        self._add_advantages(batch, values)
        return batch

    def _add_advantages(self, batch: dict[str, Any], values: torch.Tensor) -> None:
        """Replace the groups' advantages with the critic's, and add what the critic learns from to
        the batch.
        """
        # of all processes; NaN without a reward
        totals = weighted_sum(self._rewards, self.reward_weights)
        rewards = totals.tensor_split(self.accelerator.num_processes)[
            self.accelerator.process_index
        ]
        mask = learned_tokens(batch) & ~rewards.isnan().unsqueeze(1)  # (B, T)
        # as TRL detects truncated completions
        ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        advantages, returns = generalized_advantages(
            token_rewards(rewards, mask),
            values[:, :-1],
            bootstrap_values(values, batch["completion_ids"], batch["completion_mask"], ends),
            mask,
            self.args.gamma,
            self.args.gae_lambda,
        )
        spread = masked_moments(advantages, mask, self._sum_over_processes)
        targets = masked_moments(returns, mask, self._sum_over_processes)
        metrics = {
            "critic/explained_variance": explained_variance(
                values[:, :-1], returns, mask, self._sum_over_processes
            ),
            "critic/returns_mean": targets.mean.item(),
            "critic/returns_std": targets.variance.sqrt().item(),
            "advantages/mean": spread.mean.item(),
            "advantages/std": spread.variance.sqrt().item(),
        }
        self._record(metrics)
        self._log_advantages(advantages, mask)
        batch["advantages"] = whiten(advantages, mask, spread)
        batch |= {"values": values[:, :-1], "returns": returns, "critic_mask": mask}

    def _log_advantages(self, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        """Replace the groups' advantages in the table of completions with means over the tokens."""
        means = advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        everywhere = self.accelerator.gather(means).tolist()
        logged = self._logs["advantages"]
        for _ in everywhere[: len(logged)]:
            logged.pop()
        logged.extend(everywhere)
        if self.num_generations == 1:
            # always 1 for groups of one
            self._metrics[self._mode].pop("frac_reward_zero_std", None)

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the policy's loss, as the parent does; during
        its warmup only the critic learns.
        """
        loss = super().compute_loss(*args, **kwargs)
        # DeepSpeed steps before `CriticWarmupCallback` clears the gradients.
        return (
            loss * 0.0
            if self.model.training and self.state.global_step < self.args.critic_warmup_steps
            else loss
        )

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the policy's forward and backward pass, then the critic's, one after the other to
        save memory.
        """
        step = self._step  # TRL increments it
        loss = super().training_step(*args, **kwargs)
        batch = self._buffered_inputs[step % self.args.steps_per_generation]
        self.critic.backward(self._value_loss(batch, self.critic.values(batch)))
        if self.accelerator.sync_gradients:
            self._record({"critic/grad_norm": self.critic.step()})
        return loss

    def _value_loss(self, batch: dict[str, Any], values: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's share of the mean loss over an optimizer step's tokens; `values`
        is (B, T + 1).
        """
        mask = batch["critic_mask"]
        loss, clipped = value_loss(
            values[:, :-1], batch["values"], batch["returns"], self.args.value_clip_range
        )
        summed = torch.where(mask, loss, 0.0).sum()
        counts = torch.stack([summed.detach(), (clipped & mask).sum().float(), mask.sum().float()])
        total, clipped_count, count = self._sum_over_processes(counts).tolist()
        count = max(count, 1.0)
        self._record(
            {"critic/value_loss": total / count, "critic/value_clip_share": clipped_count / count}
        )
        # `num_items_in_batch` covers the whole rollout and all processes, as in the parent's
        # token-level losses.
        steps = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        return (
            summed
            * steps
            * self.accelerator.num_processes
            / batch["num_items_in_batch"].clamp(min=1.0)
        )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the policy's schedule, and the critic's optimizer, whose learning rate is
        constant.
        """
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        other = copy.copy(self)  # which builds an optimizer of its own
        other.optimizer, other.args = None, copy.copy(self.args)
        other.args.learning_rate = self.args.critic_learning_rate
        self.critic.prepare(other.create_optimizer)
        return scheduler

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.critic.save_state(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            with read_whole(Path(checkpoint)):
                self.critic.load_state(Path(checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.critic.load_state(Path(self.state.best_model_checkpoint))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy as a transformers model, and the critic in its subdirectory `critic/`."""
        self.critic.save_pretrained(
            Path(output_dir or self.args.output_dir) / CRITIC_DIRECTORY, self._tokenizer
        )
        super().save_model(output_dir, _internal_call)


class CriticWarmupCallback(TrainerCallback):
    """Callback that freezes the policy during the critic's warmup.

    The optimizer runs without gradients, so it changes no weights, builds no momentum and applies
    no weight decay.
    """

    def on_pre_optimizer_step(
        self,
        args: QuRLPPOConfig,
        state: TrainerState,
        control: Any,
        *,
        optimizer: Any,
        **kwargs: Any,
    ) -> None:
        """Clear the gradients."""
        if state.global_step < args.critic_warmup_steps:
            optimizer.zero_grad()
