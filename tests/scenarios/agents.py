"""Runs of agents: a random model calls tools because a grammar makes it do so."""

from datasets import Dataset
from short_runs import chat_tokenizer, evaluated, letters, question, questions, run, seen
from tiny import tiny_model

ANSWERS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "a:",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close_pattern": r"</call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}
"""A template by which transformers finds the tool calls in an answer."""

CALL = r'<call>\{"name": "(add|look_up)", "arguments": \{"first": [0-9], "second": [0-9]\}\}</call>'
"""Two tools, and two numbers for them."""


def add(first: int, second: int) -> int:
    """
    Add two numbers.

    Args:
        first: One number.
        second: The other.
    """
    return first + second


async def look_up(first: int, second: int) -> str:
    """
    Look up two numbers.

    Args:
        first: One number.
        second: The other.
    """
    return f"nothing of {first}"


def run_agent(out, reward_funcs, regex=CALL, **given):
    """A run whose model calls tools, as the grammar makes it do."""
    tokenizer = chat_tokenizer()
    tokenizer.response_template = ANSWERS
    given["processing_class"] = tokenizer
    return run(
        out,
        model=tiny_model(max_position_embeddings=512),
        reward_funcs=reward_funcs,
        given=given,
        vllm_structured_outputs_regex=regex,
        max_completion_length=160,
        vllm_max_model_length=384,
        max_tool_calling_iterations=1,
    )


def tools(out):
    """A plain and an asynchronous tool."""
    said = []

    def judge(completions, **kwargs):
        said.extend(completions)
        return letters(completions)

    trainer = run_agent(out, judge, train_dataset=questions(), tools=[add, look_up])
    return seen(trainer) | {"said": said[0], "evaluated": evaluated(trainer)}


class Calculator:
    """An environment that asks, offers a tool, and judges."""

    def reset(self, **kwargs):
        self.sums = []
        return "add 2 and 3"

    def add(self, first: int, second: int) -> int:
        """
        Add two numbers.

        Args:
            first: One number.
            second: The other.
        """
        self.sums.append(first + second)
        return self.sums[-1]

    def get_reward(self):
        return float(sum(self.sums))


def environment(out, factory=Calculator, data=None):
    """An environment that owns questions, tools and rewards, without reward functions and data."""
    reward = letters if data else None
    regex = CALL.replace("|look_up", "")
    return seen(run_agent(out, reward, regex, train_dataset=data, environment_factory=factory))


def environments(out):
    """Two environments; the data name one for each question."""
    rows = {"prompt": [question("add")] * 16, "environment": ["calculator", "other"] * 8}
    factories = {"calculator": Calculator, "other": type("Other", (Calculator,), {})}
    return environment(out, factories, Dataset.from_dict(rows))


def rollout_func(out):
    """A rollout function that appends text to the engine's completions, and adds a field for the
    reward.
    """

    def roll_out(prompts, trainer):
        tokenizer = trainer.processing_class
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        _, completion_ids, logps, *_ = trainer.vllm_generation.generate(
            prompts=prompt_ids, images=None, num_generations=trainer.num_generations
        )
        [added] = tokenizer("!")["input_ids"]
        logprobs = []
        env_mask = []
        noted = []
        for tokens, listed in zip(completion_ids, logps, strict=True):
            logprobs.append([of_token[0] for of_token in listed] + [0.0])
            env_mask.append([1] * len(tokens) + [0])
            noted.append(len(tokens))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [[*tokens, added] for tokens in completion_ids],
            "logprobs": logprobs,
            "env_mask": env_mask,
            "noted": noted,
        }

    def judge(completions, noted, **kwargs):
        rewards = []
        for said, length in zip(completions, noted, strict=True):
            rewards.append(float(length + len(set(said))))
        return rewards

    return seen(run(out, reward_funcs=judge, given={"rollout_func": roll_out}))
