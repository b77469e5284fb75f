"""PPO with quantized rollouts on questions with checkable answers: `trl-qurl ppo`."""

from __future__ import annotations

from dataclasses import dataclass

from trl_qurl.lab.comparison import option
from trl_qurl.lab.recipes import questions


@dataclass
class ScriptArguments(questions.ScriptArguments):
    """Training questions, and the critic's initial model."""

    value_model: str | None = option(None, "Initial model of the critic. Defaults to the policy's.")


# The paper's GSM8K run: 256 prompts with one answer of up to 512 tokens each, learning rate 1e-5,
# 15 epochs = 435 rollouts, UAQ off. The paper does not state the updates per rollout; verl's
# example of this run makes four of 64.
RECIPE = questions.Recipe(
    "ppo",
    {
        **questions.DEFAULTS,
        "output_dir": "qurl-gsm8k-ppo",
        "num_generations": 1,
        "max_steps": 4 * 435,
        "lr_scheduler_type": "constant",
        "critic_learning_rate": 1e-5,
    },
    ScriptArguments,
)

add_arguments, run = RECIPE.add_arguments, RECIPE.run
parse_arguments, train = RECIPE.parse_arguments, RECIPE.train
