"""TRL's features on INT8 rollouts, several in each run: prints, by the run's name, what a user
would see of them.

A run that fails is recorded with its traceback, and the others continue.
"""

import itertools
import os
import sys
import traceback
from pathlib import Path

from child import print_record

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import agents
import families
from datasets import IterableDataset
from short_runs import chat_tokenizer, evaluated, letters, questions, run, saved, seen
from tiny import tiny_classifier, tiny_model
from transformers import AutoModelForSequenceClassification, TrainerCallback

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}

FEW_TOKENS = {"allowed_token_ids": [1, *range(17, 25)]}
"""So few that most completions end."""


class Counter(TrainerCallback):
    """Counts the steps that it is told of."""

    steps = 0

    def on_step_end(self, *args, **kwargs):
        self.steps += 1


def rewards(out):
    """Everything about rewards, chats, logs, evaluation, and tokens that are left out."""
    import pyarrow.parquet

    judge = tiny_classifier(AutoModelForSequenceClassification)
    judge.config._name_or_path = "judge"
    asked = {}

    async def right(prompts, completions, answer, trainer_state, log_extra, log_metric, **kwargs):
        asked.update(prompt=prompts[0], step=trainer_state.global_step)
        log_extra("expected", list(answer))
        log_metric("answers", float(len(answer)))
        return contained(completions, answer)

    def sometimes(completions, **kwargs):
        scores = length(completions)
        return [None if i % 2 else score for i, score in enumerate(scores)]

    counter = Counter()
    trainer = run(
        out,
        model=saved(out),
        reward_funcs=[right, sometimes, judge],
        given={
            "train_dataset": questions(),
            "eval_dataset": questions(2),
            "processing_class": None,
            "reward_processing_classes": [None, None, chat_tokenizer()],
            "callbacks": [counter],
        },
        model_init_kwargs={"dtype": "float32"},
        reward_weights=[1.0, 0.5, 2.0],
        multi_objective_aggregation="normalize_then_sum",
        chat_template_kwargs={"mood": "!"},
        generation_kwargs=FEW_TOKENS,
        repetition_penalty=1.0,
        log_completions=True,
        num_completions_to_print=1,
        log_unique_prompts=True,
        mask_truncated_completions=True,
        top_entropy_quantile=0.5,
        entropy_coef=0.01,
        use_adaptive_entropy=True,
        entropy_target=5.0,
        entropy_coef_min=0.005,
        entropy_coef_max=0.02,
        entropy_coef_delta=0.001,
        beta=0.1,
        use_bias_correction_kl=True,
        disable_dropout=True,
        num_iterations=2,
        epsilon_high=0.28,
        off_policy_mask_threshold=0.5,
        pad_to_multiple_of=8,
        gradient_checkpointing=True,
        **EVALUATED,
        num_generations_eval=2,
        max_steps=4,
    )
    table = pyarrow.parquet.read_table(min((out / "completions").glob("*.parquet"))).to_pydict()
    return seen(trainer) | {
        "asked": asked,
        "steps": counter.steps,
        "table": table,
        "checkpointing": trainer.model.is_gradient_checkpointing,
        "evaluated": evaluated(trainer),
    }


def sampling(out):
    """A grammar, sampling settings, and questions that are streamed."""
    said = []

    def judge(completions, **kwargs):
        said.extend(completions)
        return letters(completions)

    def stream():
        for i in itertools.count():
            yield {"prompt": f"say {i}"}

    stream = IterableDataset.from_generator(stream)
    trainer = run(
        out,
        model=tiny_model(tie_word_embeddings=False),
        reward_funcs=judge,
        given={"train_dataset": stream, "processing_class": chat_tokenizer()},
        vllm_structured_outputs_regex="[0-9]{3,8}",
        temperature=0.9,
        top_p=0.95,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.1,
        cast_lm_head_to_fp32=True,
        scale_rewards="batch",
        objective="tis",
    )
    return seen(trainer) | {"said": said}


def contained(completions, answer):
    return [
        float(expected in said[0]["content"])
        for said, expected in zip(completions, answer, strict=True)
    ]


async def right(completions, answer, **kwargs):
    return contained(completions, answer)


def length(completions, **kwargs):
    return letters([said[0]["content"] for said in completions])


def chats(out, kind, given, **settings):
    """What RLOO and PPO share with GRPO."""
    return run(
        out,
        kind,
        model=saved(out),
        reward_funcs=[right, length],
        given={"eval_dataset": questions(2), "processing_class": chat_tokenizer(), **given},
        reward_weights=[1.0, 0.5],
        beta=0.05,
        log_completions=True,
        **EVALUATED | settings,
    )


def rloo(out):
    counter = Counter()
    trainer = chats(
        out,
        "RLOO",
        {"train_dataset": questions().to_iterable_dataset(), "callbacks": [counter]},
        reward_clip_range=(-5.0, 5.0),
        normalize_advantages=True,
        mask_truncated_completions=True,
        chat_template_kwargs={"mood": "!"},
        generation_kwargs=FEW_TOKENS,
        num_generations_eval=2,
    )
    return seen(trainer) | {"steps": counter.steps, "evaluated": evaluated(trainer)}


def ppo(out):
    return seen(chats(out, "PPO", {"train_dataset": questions()}, num_generations=1))


def main(directory, *names):
    records = {}
    for name in names:
        kind, *arguments = name.split("/")
        scenario = SCENARIOS[kind]
        out = Path(directory) / name.replace("/", "-")
        try:
            records[name] = scenario(out, *arguments)
        except Exception:
            records[name] = {"error": traceback.format_exc()}
    print_record(records)


SCENARIOS = vars(agents) | vars(families) | globals()

if __name__ == "__main__":
    main(*sys.argv[1:])
