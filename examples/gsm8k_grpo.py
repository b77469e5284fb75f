"""Train Qwen2.5-0.5B-Instruct on GSM8K with INT8 rollouts.

    pip install '.[vllm,math,peft]'    # in a clone of the repository
    python examples/gsm8k_grpo.py
    accelerate launch --num_processes 4 examples/gsm8k_grpo.py

The arguments are those of TRL's `GRPOConfig` and `ModelConfig`, the fields that `QuRLGRPOConfig` adds, and the
`--dataset...` options. They can also be in a YAML file; the command line overrides the file:

    python examples/gsm8k_grpo.py --rollout_quantization fp8 --objective tis
    python examples/gsm8k_grpo.py --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --use_peft --learning_rate 1e-5
    python examples/gsm8k_grpo.py --dataset my_questions.jsonl.gz --output_dir my-policy
    python examples/gsm8k_grpo.py --config my_settings.yaml --seed 1

In your own script, call `trl_qurl.quiet()` first, and use `QuRLGRPOTrainer` for `GRPOTrainer` and `QuRLGRPOConfig` for
`GRPOConfig`:

    trainer = QuRLGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=QuRLGRPOConfig(rollout_quantization="int8", objective="acr", steps_per_generation=4),
        train_dataset=load_questions("openai/gsm8k", config="main"),
    )

The defaults of this run and the reasons for them are in `trl_qurl/lab/recipes/grpo.py`; `trl-qurl grpo` is
the same run.
"""

from trl_qurl.lab.recipes.grpo import parse_arguments, train

if __name__ == "__main__":
    train(*parse_arguments())
