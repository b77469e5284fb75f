"""What short runs have in common: settings, a tokenizer for chats, questions, and two steps of a
trainer.
"""

from datasets import Dataset
from support.building import KINDS
from tiny import ENGINE, KEPT, VOCABULARY, tiny_model, tiny_tokenizer
from tokenizers import decoders

from trl_qurl.lab.evaluation.callback import evaluate_task
from trl_qurl.lab.evaluation.tasks import Task

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}{% for "
    "message in messages %}{{ message.role[0] }}:{% if message.content is string %}{{ "
    "message.content }}{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% "
    "endif %}{% for call in message.tool_calls or [] %}<call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson '
    "}}}</call>{% endfor %}"
    "{{ '<eos>' if message.role == 'assistant' else ';' }}{% endfor %}{% if add_generation_prompt "
    "%}{{ mood }}a:{% endif %}"
)
"""Of a chat: `s:Be brief.;u:add 1 and 2;a:`. It names the tools, and has an extra variable."""

BASE = {
    "per_device_train_batch_size": 8,
    "steps_per_generation": 2,
    "num_generations": 4,
    "max_completion_length": 8,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    # for comparisons with an engine that starts from the saved weights
    "smooth_activations": False,
    "vllm_engine_kwargs": ENGINE,
}
"""Settings of all short runs; a rollout has two updates."""

COMMON = BASE | {
    "max_steps": 2,
    "learning_rate": 1e-4,
    "sync_check_interval": 1,
    "vllm_max_model_length": 128,
}
"""Settings of the runs that `run` makes."""


def chat_tokenizer():
    """The tiny tokenizer, for chats with tools."""
    tokenizer = tiny_tokenizer([*VOCABULARY, "<call>", "</call>"])
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(["<call>", "</call>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def question(text):
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def questions(count=16):
    """Chats, each with an answer."""
    answers = [str(i) for i in range(count)]
    prompts = [question(f"say {i}") for i in range(count)]
    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def texts(count=16):
    return Dataset.from_dict({"prompt": [f"say {i}" for i in range(count)]})


def letters(completions, **kwargs):
    rewards = []
    for completion in completions:
        numbers = [ord(character) % 7 for character in str(completion)]
        rewards.append(sum(numbers) / 8)
    return rewards


def build(
    out, kind="GRPO", model=None, reward_funcs=letters, given=None, split_by=None, **settings
):
    """A trainer with the settings of all short runs and these; `split_by` comes before its class."""
    trainer, config = KINDS[kind]
    if split_by is not None:
        trainer = type(trainer.__name__, (split_by, trainer), {})
    given = {"train_dataset": texts(), "processing_class": tiny_tokenizer()} | (given or {})
    model = tiny_model() if model is None else model
    return trainer(model, reward_funcs, config(str(out), **BASE | settings), **given)


def run(out, kind="GRPO", model=None, reward_funcs=letters, given=None, **settings):
    """Train for two steps; the trainer."""
    trainer = build(out, kind, model, reward_funcs, given, **COMMON | settings)
    KEPT.append(trainer)
    trainer.train()
    return trainer


def saved(out):
    """A model where TRL finds it again, for the reference model and the critic."""
    tiny_model().save_pretrained(out / "model")
    chat_tokenizer().save_pretrained(out / "model")
    return f"{out}/model"


def seen(trainer):
    """The record of every run."""
    return {"history": trainer.state.log_history}


def evaluated(trainer):
    """What an evaluation asks the engine for, and how, beside the prompts that training makes of
    it.
    """
    generation = trainer.vllm_generation
    names = (
        "temperature",
        "repetition_penalty",
        "structured_outputs_regex",
        "generation_kwargs",
    )

    def settings():
        return {name: getattr(generation, name) for name in names}

    chat = [question("1+1=")]
    own = {"temperature": 2.0, "stop": ["b"]}
    generation.generation_kwargs = (generation.generation_kwargs or {}) | own
    training = settings()
    asked = {}

    def generate(prompts, **kwargs):
        asked.update(prompts=prompts, settings=settings())
        return type(generation).generate(generation, prompts=prompts, **kwargs)

    generation.generate = generate
    evaluate_task(trainer, Task("sums", chat * 4, ["$2$"] * 4))
    return {
        "asked": asked,
        "trained_on": trainer._tokenize_prompts(chat * 4)[0],
        "restored": settings() == training,
    }
