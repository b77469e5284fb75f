"""Say once why a run learns nothing: frozen models, no gradient, no effect, or equal rewards.

Loss, KL and grad_norm look healthy in the first two cases. Nothing is stopped: a learning rate of
0, as in warmup, or a few rollouts without a signal are no fault, so each message waits until it has
been true `PATIENCE` times in a row.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

from trl_qurl.trainers.callbacks import RolloutCallback
from trl_qurl.trainers.scoring import Rollout

logger = get_logger(__name__)  # of the main process

PATIENCE = 3  # rollouts, or updates with a gradient and a learning rate

INFINITE = (
    "The reward function {!r} returned inf or -inf, from which no advantage can be computed, so "
    "its answers teach nothing or end training: return a finite number, or None."
)
NO_GRADIENT = (
    "grad_norm was 0 in {} logged updates in a row, although rewards differ, so the policy does "
    "not learn: look for code that froze it after training had begun (requires_grad), and with "
    "scale_rewards='batch' for rewards that are equal within each group."
)


class LearningWatch(RolloutCallback):
    """Callback that watches gradients, changes of weights, and rewards."""

    def __init__(self) -> None:
        # steps with a gradient and a learning rate, since weights last changed
        self._moving: list[int] = []
        self._still = 0  # latest updates without a gradient, from rewards that differ
        self._alike = 0  # latest rollouts whose rewards taught nothing
        self._reason = ""  # why
        self._has_learned = False  # from the rewards of any rollout
        self._said: set[str] = set()  # kinds of messages

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        """Start the counts."""
        self._moving = []
        self._still = 0
        self._alike = 0
        self._has_learned = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: Mapping[str, float],
        **kwargs: object,
    ) -> None:
        """Warn of updates without a gradient, or that changed no weight that was sent."""
        norm = logs.get("grad_norm")
        rate = logs.get("learning_rate")
        if norm is None or rate is None:
            return
        is_warm = state.global_step > vars(args).get("critic_warmup_steps", 0)
        has_signal = self._has_learned and self._alike == 0 and is_warm
        self._still = self._still + 1 if norm == 0 and has_signal else 0
        # One update may see only groups with equal rewards, so all updates of a rollout count.
        patience = PATIENCE * max(1, self.trainer.args.updates_per_rollout)
        if self._still >= patience and "infinite" not in self._said:
            self._say_once("gradient", NO_GRADIENT.format(self._still))
        if 0 < norm < math.inf and rate > 0:
            self._moving.append(state.global_step)
        unchanged = self.trainer.vllm_generation.sync.unchanged_steps()
        self._moving = [step for step in self._moving if step >= unchanged.start]
        without_effect = [step for step in self._moving if step in unchanged]
        if len(without_effect) >= PATIENCE:
            self._say_once("weights", unchanged_text(self.trainer.model, unchanged, norm, rate))

    def on_rollout(self, rollout: Rollout) -> None:
        """Judge a training rollout by its rewards; warn if the last ones taught nothing."""
        metrics = rollout.metrics
        if not self.trainer.model.training or "reward" not in metrics:
            return
        for name in self.trainer.reward_func_names:
            is_infinite = math.isinf(metrics.get(f"rewards/{name}/mean", 0.0))
            if is_infinite and not math.isfinite(metrics["reward"]):  # its weight is not 0
                self._say_once("infinite", INFINITE.format(name))
        if self.trainer._has_signal(metrics):
            self._alike = 0
            self._has_learned = True
            return
        self._alike += 1
        self._reason = reason_alike(self.trainer, metrics)
        if self._alike == PATIENCE:
            self._say_once(
                "rewards", f"Nothing to learn from {PATIENCE} rollouts in a row: {self._reason}."
            )

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """Say so if no rollout's rewards taught the policy anything."""
        if self._alike and not self._has_learned:
            self._say_once("end", f"The policy has learned nothing: {self._reason}.")

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(text)


def unchanged_text(model: PreTrainedModel, steps: range, norm: float, rate: float) -> str:
    """Return the message about updates that changed no weight."""
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    way = (
        "compare trainer.optimizer with model.named_parameters(), and look for a callback that "
        "restores weights"
    )
    if trained & {torch.bfloat16, torch.float16}:
        way = (
            "the trained weights have 16 bits, in which an update this small rounds to nothing: "
            "load the model in float32 (dtype='float32' in model_init_kwargs; bf16 or fp16 keeps "
            "it fast), or raise the learning rate"
        )
    return (
        f"The updates of steps {steps[0]} to {steps[-1]} changed no weight of the policy, though "
        f"the learning rate is {rate:.2g} and grad_norm {norm:.2g}: {way}."
    )


def reason_alike(trainer: Any, metrics: Mapping[str, float]) -> str:
    """Return why the rewards of a rollout taught nothing, and what to do."""
    cut = metrics.get("completions/clipped_ratio", 0.0)
    reward = metrics["reward"]
    limit = trainer.max_completion_length
    if math.isnan(reward):
        return "no reward function returned a finite number"
    if cut == 1 or (cut > 0.5 and reward <= 0):
        return f"{cut:.0%} of the answers were cut off at max_completion_length={limit}, raise it"
    if reward != 0:
        return (
            f"all answers to a question earned the same reward, {reward:.3g} on average, choose "
            "questions that the policy solves sometimes"
        )
    return (
        "no answer earned a reward, read some (log_completions=True); for accuracy_reward, they "
        r"need a \boxed{}"
    )
