"""GRPO with quantized rollouts on questions with checkable answers: `trl-qurl grpo`."""

from trl_qurl.lab.recipes.questions import DEFAULTS, Recipe

RECIPE = Recipe(
    "grpo",
    {
        **DEFAULTS,
        "output_dir": "qurl-gsm8k",
        "num_generations": 8,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 20,
    },
)

add_arguments, run = RECIPE.add_arguments, RECIPE.run
parse_arguments, train = RECIPE.parse_arguments, RECIPE.train
