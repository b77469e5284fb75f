"""Train Qwen2.5-0.5B-Instruct on GSM8K by PPO with a critic and INT8 rollouts: the paper's first experiment.

    pip install '.[vllm,math,peft]'    # in a clone of the repository
    python examples/gsm8k_ppo.py
    accelerate launch --num_processes 4 examples/gsm8k_ppo.py --gradient_accumulation_steps 1 --steps_per_generation 4

The arguments are those of TRL's `GRPOConfig` and `ModelConfig`, the fields that `QuRLPPOConfig` adds, the
`--dataset...` options and `--value_model`. They can also be in a YAML file; the command line overrides the file:

    python examples/gsm8k_ppo.py --value_model Qwen/Qwen2.5-1.5B-Instruct --critic_warmup_steps 20
    python examples/gsm8k_ppo.py --config my_settings.yaml --seed 1

In your own script, after `trl_qurl.quiet()`:

    trainer = QuRLPPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=QuRLPPOConfig(rollout_quantization="int8", objective="acr", steps_per_generation=4),
        train_dataset=load_questions("openai/gsm8k", config="main"),
    )

The defaults of this run and the reasons for them are in `trl_qurl/lab/recipes/ppo.py`; `trl-qurl ppo` is the same run.
"""

from trl_qurl.lab.recipes.ppo import parse_arguments, train

if __name__ == "__main__":
    train(*parse_arguments())
