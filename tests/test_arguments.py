"""Arguments of a trainer, in TRL's order and by name: used as TRL uses them, or refused before an
engine starts.
"""

import functools
import re

import pytest
import torch
from accelerate.logging import MultiProcessAdapter
from datasets import Dataset, DatasetDict
from peft import (
    LNTuningConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from support.building import CONFIGS, PROMPTS, STARTED, build, reward, settings_of, start_no_engine
from tiny import VOCABULARY, tiny_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from trl_qurl import QuRLGRPOTrainer
from trl_qurl.rollout.engine.hardware import WORTH_COMPILING
from trl_qurl.trainers.arguments import check_plain_generation, rollout_settings
from trl_qurl.trainers.run_log import RUN_LOG, begin_log, end_log

INIT = "trl_qurl.rollout.backend.QuantizedVLLMGeneration._init_vllm"
each_trainer = pytest.mark.parametrize("cls", CONFIGS)
grpo = functools.partial(build, QuRLGRPOTrainer)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    monkeypatch.setattr(INIT, start_no_engine)


@each_trainer
def test_arguments_are_taken_in_trls_order(cls, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    given = [str(tmp_path / "model"), reward, settings_of(cls, tmp_path / "out")]
    with pytest.raises(AssertionError, match=STARTED):
        cls(*given, PROMPTS, None, tiny_tokenizer())
    with pytest.raises(ValueError, match="eval_dataset has no column 'prompt'"):
        cls(*given, PROMPTS, PROMPTS.remove_columns("prompt"), tiny_tokenizer())
    with pytest.raises(TypeError, match="multiple values for argument 'train_dataset'"):
        cls(*given, PROMPTS, train_dataset=PROMPTS)
    with pytest.raises(TypeError, match="too many positional arguments"):
        cls(*given, *[None] * 20)


@pytest.mark.parametrize("objective", [None, "tis", "decoupled"])
def test_vespo_needs_no_setting_of_trls_correction(objective, tmp_path):
    args = settings_of(QuRLGRPOTrainer, tmp_path, loss_type="vespo", objective=objective)
    with pytest.raises(AssertionError, match=STARTED):
        grpo(tmp_path, args=args)


def test_an_adapter_is_not_a_model(tmp_path):
    get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/adapter .*PeftModel.*is_trainable"):
        grpo(tmp_path, model=str(tmp_path / "adapter"))


@each_trainer
def test_a_directory_in_which_another_run_trains_is_refused(cls, tmp_path):
    begin_log(tmp_path / RUN_LOG, {})
    with pytest.raises(RuntimeError, match=str(tmp_path)):
        build(cls, tmp_path)
    end_log(tmp_path / RUN_LOG)


@pytest.mark.parametrize("streamed", [False, True])
def test_data_without_prompts_is_refused(streamed, tmp_path):
    data = Dataset.from_dict({"question": ["ab"] * 16, "answer": ["c"] * 16})
    data = data.to_iterable_dataset() if streamed else data
    message = (
        r"train_dataset .*'prompt'.* 'question', 'answer'.*rename_column\('question', 'prompt'\)"
    )
    with pytest.raises(ValueError, match=message):
        grpo(tmp_path, data=data)


def test_data_for_evaluation_needs_prompts_too(tmp_path):
    data = DatasetDict(easy=PROMPTS, hard=PROMPTS.rename_column("prompt", "question"))
    with pytest.raises(ValueError, match="hard .*'prompt', only 'question', 'solution'"):
        grpo(tmp_path, eval_dataset=data)


def test_a_stream_with_unknown_columns_is_read_first(tmp_path):
    stream = PROMPTS.to_iterable_dataset().map(lambda row: row)
    assert stream.column_names is None
    with pytest.raises(AssertionError, match=STARTED):
        grpo(tmp_path, data=stream)


class Judge:
    __name__ = "judge"

    def __call__(self, prompts, completions):
        return [0.0] * len(completions)


async def asks(completions, texts, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda samples, **kwargs: [], "'<lambda>' .*'samples'"),
        (lambda completions, answer, **kwargs: [], "'<lambda>' .*'answer'"),
        (lambda completions: [], "'<lambda>' .*'prompts'"),
        (lambda completions, /, **kwargs: [], "'<lambda>' .*'completions'"),
        (Judge(), "'judge' .*'completion_ids'"),
        (asks, "'asks' .*'texts'"),
        ([reward, lambda x: []], "'<lambda>'"),
    ],
)
def test_a_reward_function_that_trl_cannot_call_is_refused(function, message, tmp_path):
    passed = "prompts, completions, completion_ids, trainer_state, log_extra, log_metric, solution"
    with pytest.raises(ValueError, match=f"{message}.*{passed}"):
        grpo(tmp_path, function=function)


def with_judge(completions, judge, **kwargs):
    return [judge(completion) for completion in completions]


def supplies_judge(function):
    @functools.wraps(function)
    def wrapped(completions, **kwargs):
        return function(completions, judge=len, **kwargs)

    return wrapped


PARTIAL = functools.partial(with_judge, judge=len)
CALLABLE = {
    "plain": reward,
    "all "
    "names": lambda prompts, completions, completion_ids, trainer_state, log_extra, log_metric, solution: [],
    "optional": lambda completions, solution, optional=None, **kwargs: [],
    "several": [reward, lambda **kwargs: []],
    "partial": PARTIAL,
    "partial with a signature": functools.update_wrapper(PARTIAL, with_judge),
    "wrapper that adds an argument": supplies_judge(with_judge),
}


@pytest.mark.parametrize("function", CALLABLE.values(), ids=CALLABLE)
def test_a_reward_function_that_trl_can_call_is_accepted(function, tmp_path):
    with pytest.raises(AssertionError, match=STARTED):
        grpo(tmp_path, function=function)


def test_a_wrapper_that_trl_cannot_call_is_refused(tmp_path):
    @functools.wraps(reward)
    def wrapped(samples, **kwargs):
        return reward(samples, **kwargs)

    with pytest.raises(ValueError, match="'reward' .*'samples'"):
        grpo(tmp_path, function=wrapped)


def test_columns_are_those_of_a_transform(tmp_path):
    stored = Dataset.from_dict({"question": ["ab"] * 16})
    made = stored.with_transform(
        lambda rows: {"prompt": rows["question"], "solution": rows["question"]}
    )
    with pytest.raises(AssertionError, match=STARTED):
        grpo(
            tmp_path,
            data=made,
            eval_dataset=made,
            function=lambda completions, solution, **kwargs: [],
        )
    gone = PROMPTS.with_transform(lambda rows: {"question": rows["prompt"]})
    with pytest.raises(ValueError, match="train_dataset .*'prompt', only 'question'"):
        grpo(tmp_path, data=gone)
    images = PROMPTS.with_transform(lambda rows: rows | {"image": rows["prompt"]})
    with pytest.raises(ValueError, match="dynamic_sampling=True .*images"):
        check_plain_generation({"train_dataset": images}, "dynamic_sampling=True")


@pytest.fixture
def small_context(monkeypatch):
    """An engine that holds twenty tokens, of which a completion may take sixteen."""
    MultiProcessAdapter.warning_once.cache_clear()
    started = {"kept": (), "context": 20}
    monkeypatch.setattr(INIT, lambda self: vars(self).update(started))


@pytest.mark.parametrize("split", ["data", "eval_dataset"])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            "a" * 20,
            "of 20 tokens .* 20 tokens .vllm_max_model_length; of a server, --max-model-len",
        ),
        ("", "has no tokens"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(
    split, prompt, message, small_context, tmp_path
):
    data = Dataset.from_dict({"prompt": [*["abcd"] * 15, prompt]})
    row = {"data": "train_dataset", "eval_dataset": "eval_dataset"}[split]
    with pytest.raises(ValueError, match=rf"The prompt {row}\[15\] {message}"):
        grpo(tmp_path, **{split: data})


def test_all_prompts_are_measured_in_tokens(small_context, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["long word "])
    few_tokens = ["long word " * 5] * 15
    evaluation = DatasetDict(
        easy=PROMPTS, hard=Dataset.from_dict({"prompt": [*few_tokens, "a" * 20]})
    )
    given = {"processing_class": tokenizer, "model": tiny_model(vocab_size=110)}
    grpo(tmp_path, data=Dataset.from_dict({"prompt": few_tokens + ["a"]}), **given)
    with pytest.raises(ValueError, match=r"eval_dataset\['hard'\]\[15\] of 20 tokens"):
        grpo(tmp_path, eval_dataset=evaluation, **given)


@each_trainer
def test_prompts_are_measured_before_the_engine_starts_if_the_context_is_set(cls, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")  # where a critic starts
    given = {
        "model": str(tmp_path / "model"),
        "data": Dataset.from_dict({"prompt": [*["ab"] * 15, "a" * 20]}),
    }
    with pytest.raises(ValueError, match=r"train_dataset\[15\] of 20 tokens .* 20 tokens"):
        build(cls, tmp_path, args=settings_of(cls, tmp_path, vllm_max_model_length=20), **given)
    with pytest.raises(AssertionError, match=STARTED):
        build(cls, tmp_path, args=settings_of(cls, tmp_path, vllm_max_model_length=21), **given)


@pytest.mark.parametrize(("length", "is_warned_of"), [(None, False), (1, False), (2, True)])
def test_completions_that_end_early_are_warned_of(length, is_warned_of, caplog, tmp_path):
    """The longest prompt leaves room for one token. A length of `None` is all that is left."""
    MultiProcessAdapter.warning_once.cache_clear()
    args = settings_of(
        QuRLGRPOTrainer, tmp_path, vllm_max_model_length=21, max_completion_length=length
    )
    with pytest.raises(AssertionError, match=STARTED):
        grpo(tmp_path, args=args, data=Dataset.from_dict({"prompt": [*["ab"] * 15, "a" * 20]}))
    assert ("Long prompts end completions before" in caplog.text) == is_warned_of


def test_a_part_of_a_large_dataset_is_measured(small_context, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("trl_qurl.trainers.prompts.MEASURED", 12)
    monkeypatch.setattr("trl_qurl.trainers.prompts.BATCH", 5)
    grpo(tmp_path, data=Dataset.from_dict({"prompt": [*["ab"] * 12, "a" * 20]}))
    assert "Only the first 12 of 13 prompts of train_dataset were measured" in caplog.text
    with pytest.raises(ValueError, match=r"train_dataset\[11\] of 20 tokens"):
        grpo(tmp_path, data=Dataset.from_dict({"prompt": [*["ab"] * 11, "a" * 20]}))


def tokenizer_that_adds(single: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer, which surrounds each text `$A` with special tokens, and a template for
    chats.
    """
    tokenizer = tiny_tokenizer(["<pad>", "<eos>", "<bos>", *VOCABULARY[2:-1]], bos_token="<bos>")
    special = [("<eos>", 1), ("<bos>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=special
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif "
        "%}"
    )
    return tokenizer


USER, ASSISTANT = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
DOUBTFUL = {
    "an end": (
        "$A <eos>",
        "ab",
        r"end with '<eos>', which the tokenizer adds.*add_eos_token=False",
    ),
    "an end in the text": ("$A <eos>", "ab<eos>", None),
    "two starts": (
        "<bos> $A",
        "<bos>ab",
        "begin with two '<bos>': leave the token out of the text",
    ),
    "one start": ("<bos> $A", "ab", None),
    "an answer": (
        "$A",
        [USER, ASSISTANT],
        "end with an assistant's turn, after which the chat template opens another",
    ),
    "a question": ("$A", [USER, ASSISTANT, USER], None),
}


@pytest.mark.parametrize(("single", "prompt", "message"), DOUBTFUL.values(), ids=DOUBTFUL)
def test_prompts_that_the_policy_would_not_answer_get_a_warning(
    single, prompt, message, small_context, caplog, tmp_path
):
    plain = "cd" if isinstance(prompt, str) else [USER]
    data = Dataset.from_dict({"prompt": [*[plain] * 14, prompt, prompt]})
    first = 0 if single == "$A <eos>" else 14  # the tokenizer ends the plain text, too
    grpo(tmp_path, data=data, processing_class=tokenizer_that_adds(single))
    said = [text for text in caplog.messages if "the first of which is" in text]
    if message is not None:
        [warning] = said
        assert re.search(
            rf"\b{16 - first} prompts, the first of which is train_dataset\[{first}\], {message}",
            warning,
        )
    elif single == "$A <eos>":
        assert "14 prompts" in said[0], "the text that ends with the token means it"
    else:
        assert not said


def test_a_token_beyond_the_embedding_is_refused_if_a_prompt_has_it(tmp_path):
    tiny_model(vocab_size=98).save_pretrained(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<t{number}>" for number in range(9)])
    given = {"model": str(tmp_path / "model"), "processing_class": tokenizer}
    # 106 tokens, of which no prompt has the last eight
    with pytest.raises(AssertionError, match=STARTED):
        grpo(tmp_path, data=Dataset.from_dict({"prompt": ["a<t0>"] * 16}), **given)
    beyond = Dataset.from_dict({"prompt": [*["ab"] * 15, "a<t1>"]})
    message = r"'<t1>', .*train_dataset\[15\], .*98.* 98 rows.*resize_token_embeddings"
    with pytest.raises(ValueError, match=message):
        grpo(tmp_path, data=beyond, **given)
    tokenizer.add_special_tokens({"pad_token": "<t8>"})
    with pytest.raises(ValueError, match="'<t8>', .*padding token, .*105.* 98 rows"):
        grpo(tmp_path, **given)


def test_a_policy_that_nothing_trains_is_refused(tmp_path):
    policy = tiny_model()
    policy.save_pretrained(tmp_path / "model")
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    get_peft_model(policy, lora).save_pretrained(tmp_path / "adapter")

    def base():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    for settings in ({}, {"beta": 0.1}):
        args = settings_of(QuRLGRPOTrainer, tmp_path, **settings)
        frozen = PeftModel.from_pretrained(base(), tmp_path / "adapter")
        with pytest.raises(
            ValueError, match="The policy has no trainable parameter.*is_trainable=True"
        ):
            grpo(tmp_path, model=frozen, args=args)
        trained = PeftModel.from_pretrained(base(), tmp_path / "adapter", is_trainable=True)
        with pytest.raises(AssertionError, match=STARTED):
            grpo(tmp_path, model=trained, args=args)
    merged = PeftModel.from_pretrained(base(), tmp_path / "adapter").merge_and_unload()
    with pytest.raises(
        ValueError, match="The policy has no trainable parameter.*requires_grad_.*merge_and_unload"
    ):
        grpo(tmp_path, model=merged)
    inference = LoraConfig(r=4, target_modules=["q_proj"], inference_mode=True)
    with pytest.raises(
        ValueError, match="The policy has no trainable parameter.*inference_mode=False"
    ):
        grpo(tmp_path, model=base(), peft_config=inference)


def test_a_reward_function_whose_column_is_removed_is_refused(tmp_path):
    def graded(completions, solution, **kwargs):
        return [0.0] * len(completions)

    args = settings_of(QuRLGRPOTrainer, tmp_path, remove_unused_columns=True)
    with pytest.raises(ValueError, match="'graded' .*remove_unused_columns=True .*solution"):
        grpo(tmp_path, function=graded, args=args)
    with pytest.raises(AssertionError, match=STARTED):
        grpo(tmp_path, args=settings_of(QuRLGRPOTrainer, tmp_path, remove_unused_columns=True))


def test_prompts_that_leave_too_little_context_get_a_warning(small_context, caplog, tmp_path):
    def warnings(prompt):
        caplog.clear()
        grpo(tmp_path, data=Dataset.from_dict({"prompt": [prompt] * 16}))
        return [
            record.getMessage()
            for record in caplog.records
            if "Long prompts" in record.getMessage()
        ]

    assert not warnings("abcd")
    [warning] = warnings("abcde")
    assert "max_completion_length=16" in warning and "20 tokens" in warning


def test_reward_functions_may_take_what_a_rollout_function_adds(tmp_path):
    given = {
        "rollout_func": lambda prompts, trainer: {},
        "function": lambda completions, score, **kwargs: [],
    }
    with pytest.raises(AssertionError, match=STARTED):
        grpo(tmp_path, **given)


CAUSAL = {"task_type": "CAUSAL_LM"}
NOT_MERGED = {
    r"PromptTuningConfig \(PROMPT_TUNING\)": PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    r"PrefixTuningConfig \(PREFIX_TUNING\)": PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    r"LoraConfig \(alora_invocation_tokens\)": LoraConfig(alora_invocation_tokens=[40], **CAUSAL),
    r"LoraConfig \(trainable_token_indices\)": LoraConfig(trainable_token_indices=[5], **CAUSAL),
    # swaps modules
    r"LNTuningConfig \(LN_TUNING\)": LNTuningConfig(target_modules=["norm"], **CAUSAL),
    # shares tensors among layers
    r"VeraConfig \(VERA\)": VeraConfig(r=4, target_modules=["q_proj"], **CAUSAL),
}


@pytest.mark.parametrize("name", NOT_MERGED)
def test_an_adapter_that_cannot_be_merged_is_refused(name, tmp_path):
    for given in (
        {"peft_config": NOT_MERGED[name]},
        {"model": get_peft_model(tiny_model(), NOT_MERGED[name])},
    ):
        with pytest.raises(ValueError, match=f"{name}.*LoRA"):
            grpo(tmp_path, **given)


def test_a_run_on_a_cpu_that_is_too_short_is_not_compiled(tmp_path, monkeypatch):
    def eager(**changed):
        size = {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_completion_length": 50,
        }
        args = settings_of(QuRLGRPOTrainer, tmp_path, **size | changed)
        return rollout_settings(args).engine_kwargs.get("enforce_eager", "vLLM's default")

    assert WORTH_COMPILING == 30_000, "answers of the runs below"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert (
        eager(max_steps=74) is True
        and eager(max_steps=75) == eager(max_steps=-1) == "vLLM's default"
    )
    assert eager(max_steps=1, vllm_engine_kwargs={"enforce_eager": False}) is False
    monkeypatch.setattr("trl_qurl.trainers.arguments.gpu_capability", lambda: (9, 0))
    assert eager(max_steps=1) == "vLLM's default"


class Begun(Exception):
    """Raised when training begins, before the first rollout."""


class EndsAtOnce(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        raise Begun


@each_trainer
def test_an_optimizer_without_the_policys_parameters_is_refused(
    cls, small_context, tmp_path, caplog
):
    tiny_model().save_pretrained(tmp_path / "model")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    def train(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        build(
            cls, tmp_path, model=policy, optimizers=(optimizer, None), callbacks=[EndsAtOnce()]
        ).train()

    with pytest.raises(
        ValueError,
        match="The optimizer holds 0 of the policy's 26 trainable tensors .such as model",
    ):
        train(tiny_model().parameters())
    caplog.clear()
    with pytest.raises(Begun):
        train(list(policy.parameters()))
    assert "The optimizer holds" not in caplog.text
    with pytest.raises(Begun):
        train(list(policy.parameters())[1:])
    assert (
        "holds 25 of the policy's 26 trainable tensors. The others keep their values (such as "
        "model." in caplog.text
    )
