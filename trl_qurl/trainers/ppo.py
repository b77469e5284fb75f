"""`QuRLPPOTrainer`: PPO with a critic, on quantized rollouts.

Each override calls `QuRLGRPOTrainer`'s and adds the critic: to scoring (values, advantages), the loss (the batch to
learn from), the training step (its update) and checkpoints. TRL's loss accepts one advantage per token, so the policy
side of PPO is TRL's.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, get_scheduler

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
from trl_qurl.trainers.callbacks import CriticWarmupCallback
from trl_qurl.trainers.critic.critic import CRITIC_DIRECTORY, Critic, build_optimizer
from trl_qurl.trainers.critic.value_model import load_critic_model
from trl_qurl.trainers.dynamic_sampling.sampler import weighted_sum
from trl_qurl.trainers.grpo import QuRLGRPOTrainer, learned_tokens

if TYPE_CHECKING:
    from peft import PeftConfig


class QuRLPPOTrainer(QuRLGRPOTrainer):
    """Proximal policy optimization with a critic, on rollouts from a quantized copy of the policy.

    Args:
        model: See [`~trl.GRPOTrainer`].
        reward_funcs: See [`~trl.GRPOTrainer`].
        args: A [`QuRLPPOConfig`] or a [`~trl.GRPOConfig`]; `None` for the defaults.
        value_model: The critic's initial model: a name, a path, or a token classifier with one label; `None` for the
            policy's initial model.
        value_peft_config: PEFT config for a critic that trains only an adapter and its head.
        positional: Remaining arguments of [`~trl.GRPOTrainer`], in its order (`train_dataset`, `eval_dataset`, ...).
        kwargs: The same arguments by name (`train_dataset`, `peft_config`, ...).

    Raises:
        TypeError: `args` is neither a `QuRLPPOConfig` nor a `GRPOConfig`, or `value_model` has no value per token.
        ValueError: The critic's tokenizer differs from the policy's, or its architecture has no token classifier.
        ImportError: vLLM is not installed.

    Example:

    ```python
    from datasets import load_dataset
    from trl_qurl import QuRLPPOConfig, QuRLPPOTrainer

    trainer = QuRLPPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=lambda completions, **kwargs: [float(len(set(completion))) for completion in completions],
        args=QuRLPPOConfig("output", steps_per_generation=16, gradient_accumulation_steps=4),
        train_dataset=load_dataset("trl-lib/tldr", split="train"),
    )
    trainer.train()
    ```
    """

    _config_class = QuRLPPOConfig
    _algorithm = "PPO"
    _algorithm_citation = """@article{schulman2017proximal,
    title        = {{Proximal Policy Optimization Algorithms}},
    author       = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},
    year         = 2017,
    eprint       = {arXiv:1707.06347},
}"""
    _tag_names = ["trl", "ppo", "qurl"]

    critic: Critic

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
        arguments = self._checked_arguments(model, reward_funcs, args, *positional, **kwargs)
        args = arguments["args"]
        # Load the critic first: its errors should surface before the engine's slow start.
        tokenizer = arguments.get("processing_class")
        critic_model = load_critic_model(args, model, tokenizer, value_model, value_peft_config)
        if args.critic_warmup_steps:
            warmup = CriticWarmupCallback(args.critic_warmup_steps)
            arguments["callbacks"] = [*(arguments.get("callbacks") or []), warmup]
        self._rewards_per_func = torch.empty(0)  # of the latest rollout, on all processes: (B · processes, functions)
        self._micro_batch: dict[str, Any] = {}
        self._critic_seconds = 0.0
        super().__init__(**arguments)
        self.critic = Critic(critic_model, args, self.accelerator)

    # Rollout ---------------------------------------------------------------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_per_func

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        started = time.perf_counter()
        size = getattr(self.args, f"per_device_{self._mode}_batch_size")
        values = self.critic.rollout_values(batch, size)  # (B, T + 1)
        self._record({"time/values_s": time.perf_counter() - started})
        self._add_advantages(batch, values)
        return batch

    def _add_advantages(self, batch: dict[str, Any], values: torch.Tensor) -> None:
        """Replace the groups' advantages with the critic's, and add what the critic learns from to the batch."""
        rewards = self._local_rewards(batch)  # (B,), NaN if no reward function returned one
        mask = learned_tokens(batch) & ~rewards.isnan().unsqueeze(1)  # (B, T)
        ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]  # as TRL detects truncated completions
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
            "critic/explained_variance": explained_variance(values[:, :-1], returns, mask, self._sum_over_processes),
            "critic/returns_mean": targets.mean.item(),
            "critic/returns_std": targets.variance.sqrt().item(),
            "advantages/mean": spread.mean.item(),
            "advantages/std": spread.variance.sqrt().item(),
        }
        self._record(metrics)
        self._log_advantages(advantages, mask)
        batch |= {
            "advantages": whiten(advantages, mask, spread),
            "values": values[:, :-1],
            "returns": returns,
            "critic_mask": mask,
        }

    def _local_rewards(self, batch: dict[str, Any]) -> torch.Tensor:
        rewards = weighted_sum(self._rewards_per_func, self.reward_weights)
        count = batch["completion_ids"].size(0)
        return rewards[self.accelerator.process_index * count :][:count]

    def _log_advantages(self, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        """Replace the groups' advantages in the table of completions with means over the tokens."""
        means = advantages.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        everywhere = self.accelerator.gather(means).tolist()
        logged = self._logs["advantages"]
        for _ in everywhere[: len(logged)]:
            logged.pop()
        logged.extend(everywhere)
        if self.num_generations == 1:
            self._metrics[self._mode].pop("frac_reward_zero_std", None)  # always 1 for groups of one

    # Loss and update -------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if missing := {"values", "returns", "critic_mask"} - inputs.keys():
            raise ValueError(
                f"The batch has no {', '.join(sorted(missing))}, which this trainer's critic adds: pass on what "
                "_generate_and_score_completions returns, with every key."
            )
        loss = super()._compute_loss(model, inputs)
        if not self.model.training:
            return loss
        self._micro_batch = inputs
        # During its warmup only the critic learns; the callback keeps the optimizer from changing the policy.
        return loss * 0.0 if self.state.global_step < self.args.critic_warmup_steps else loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the policy's forward and backward pass, then the critic's, one after the other to save memory."""
        loss = super().training_step(*args, **kwargs)
        started = time.perf_counter()
        self.critic.learn(self._micro_batch, self._value_loss)
        self._micro_batch = {}
        metrics = self.critic.step() if self.accelerator.sync_gradients else {}
        self._critic_seconds += time.perf_counter() - started
        if metrics:
            self._record(metrics | {"time/critic_update_s": self._critic_seconds})
            self._critic_seconds = 0.0
        return loss

    def _value_loss(self, values: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's share of the mean loss over an optimizer step's tokens; `values` is (B, T + 1)."""
        batch = self._micro_batch
        mask = batch["critic_mask"]
        loss, clipped = value_loss(values[:, :-1], batch["values"], batch["returns"], self.args.value_clip_range)
        summed = torch.where(mask, loss, 0.0).sum()
        counts = torch.stack([summed.detach(), (clipped & mask).sum().float(), mask.sum().float()])
        total, clipped_count, count = self._sum_over_processes(counts).tolist()
        count = max(count, 1.0)
        self._record({"critic/value_loss": total / count, "critic/value_clip_share": clipped_count / count})
        # `num_items_in_batch` covers the whole rollout and all processes, as in the parent's token-level losses.
        steps = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        return summed * steps * self.accelerator.num_processes / batch["num_items_in_batch"].clamp(min=1.0)

    # Optimizer and checkpoints ---------------------------------------------------------------------------------------

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the policy's schedule and the critic's optimizer and schedule."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self.critic.prepare(
            lambda model: build_optimizer(model, self.args, decayed=set(self.get_decay_parameter_names(model))),
            lambda critic_optimizer: self.create_critic_scheduler(critic_optimizer, num_training_steps),
        )
        return scheduler

    def create_critic_scheduler(self, optimizer: torch.optim.Optimizer, num_training_steps: int) -> Any:
        """Create the critic's learning rate schedule, which is constant unless a subclass overrides this method.

        Args:
            optimizer: The critic's optimizer.
            num_training_steps: Number of optimizer steps in the whole run.

        Returns:
            A torch scheduler.
        """
        return get_scheduler("constant", optimizer)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.critic.save_state(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.critic.load_state(Path(checkpoint))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy as a transformers model, and the critic in its subdirectory `critic/`.

        Args:
            output_dir: Directory; defaults to the run's output directory.
        """
        self.critic.save_pretrained(Path(output_dir or self.args.output_dir) / CRITIC_DIRECTORY, self._tokenizer)
        super().save_model(output_dir, _internal_call)

    def _describe_run(self) -> tuple[list[str], dict[str, object]]:
        sentences, settings = super()._describe_run()
        settings |= {
            "`gamma`, `gae_lambda`": f"{self.args.gamma}, {self.args.gae_lambda}",
            "`critic_learning_rate`": self.args.critic_learning_rate,
        }
        return [*sentences, "A critic replaces the groups."], settings
