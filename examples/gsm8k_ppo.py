"""Train Qwen2.5-0.5B-Instruct on GSM8K by PPO with a critic and INT8 rollouts: the paper's first
experiment.

    pip install '.[vllm,math]'    # in a clone of the repository
    python examples/gsm8k_ppo.py
    accelerate launch --num_processes 4 examples/gsm8k_ppo.py \\
        --gradient_accumulation_steps 1 --steps_per_generation 4

The fields of `QuRLPPOConfig` are options (`--critic_learning_rate 1e-6`; without a GPU,
`--use_cpu`). `trl-qurl ppo` trains any model on any questions.
"""

from datasets import load_dataset
from trl import TrlParser
from trl.rewards import accuracy_reward

from trl_qurl import QuRLPPOConfig, QuRLPPOTrainer

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

SETTINGS = {
    "output_dir": "qurl-gsm8k-ppo",
    "rollout_quantization": "int8",
    # A rollout of 256 questions with one answer each gives four updates of 64. 435 rollouts are 15
    # epochs.
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,
    "num_generations": 1,
    "max_steps": 4 * 435,
    "max_completion_length": 512,
    "learning_rate": 1e-5,
    "critic_learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "logging_steps": 4,
}


def as_task(row):
    """Turn a row of GSM8K into a conversation and its solution, as TRL's reward reads it."""
    prompt = [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}]
    return {"prompt": prompt, "solution": f"${row['answer'].rpartition('####')[2].strip()}$"}


if __name__ == "__main__":
    parser = TrlParser(QuRLPPOConfig, usage="%(prog)s [--OPTION VALUE ...]")
    parser.set_defaults(**SETTINGS)
    try:
        (args,) = parser.parse_args_and_config()
    except ValueError as error:  # an unknown option, or settings that do not fit
        parser.error(str(error))
    questions = load_dataset("openai/gsm8k", "main", split="train")
    trainer = QuRLPPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=args,
        train_dataset=questions.map(as_task, remove_columns=questions.column_names),
    )
    trainer.train()
    trainer.save_model()
