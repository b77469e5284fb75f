"""RLOO with quantized rollouts on questions with checkable answers: `trl-qurl rloo`."""

from trl_qurl.lab.recipes.questions import DEFAULTS, Recipe

# One update per rollout, as in REINFORCE: with hundreds of tokens per answer, its ratio soon leaves
# the clip range.
RECIPE = Recipe(
    "rloo",
    {
        **DEFAULTS,
        "output_dir": "qurl-gsm8k-rloo",
        "num_generations": 8,
        "gradient_accumulation_steps": 16,
        "logging_steps": 1,
        "save_steps": 25,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
    },
)

add_arguments, run = RECIPE.add_arguments, RECIPE.run
parse_arguments, train = RECIPE.parse_arguments, RECIPE.train
