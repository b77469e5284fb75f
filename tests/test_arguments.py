"""Arguments of a trainer, in TRL's order and by name: used as TRL uses them, or refused before an
engine starts.
"""

import functools
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.logging import MultiProcessAdapter
from datasets import Dataset, DatasetDict
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    VeraConfig,
    get_peft_model,
)
from support.building import CONFIGS, PROMPTS, STARTED, build, reward, settings_of, start_no_engine
from tiny import VOCABULARY, tiny_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, TrainerState
from trl import GRPOTrainer, RLOOTrainer

from trl_qurl import QuRLGRPOTrainer, QuRLRLOOTrainer
from trl_qurl.trainers.arguments import checked_config, rollout_settings
from trl_qurl.trainers.callbacks import RolloutCallback
from trl_qurl.trainers.run_log import RUN_LOG, begin_log, end_log

INIT = "trl_qurl.rollout.backend.QuantizedVLLMGeneration._init_vllm"
each_trainer = pytest.mark.parametrize("cls", CONFIGS)


def prompts(common, last):
    """Fifteen prompts, and another one."""
    return Dataset.from_dict({"prompt": [*[common] * 15, last]})


LONG = prompts("ab", "a" * 20)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    monkeypatch.setattr(INIT, start_no_engine)


@pytest.fixture
def attempt(tmp_path):
    """Build a trainer, and return its error; `STARTED` if it passes all checks."""

    def attempt(cls=QuRLGRPOTrainer, args=None, **given):
        with pytest.raises(Exception) as error:
            build(cls, tmp_path, args=settings_of(cls, tmp_path, **args or {}), **given)
        return str(error.value)

    return attempt


def assert_names(message, *words):
    for word in words:
        assert word in message


@pytest.fixture
def path(tmp_path):
    """Where a tiny model lies."""
    tiny_model().save_pretrained(tmp_path / "model")
    return f"{tmp_path}/model"


def test_without_a_config_there_are_defaults():
    assert checked_config(SimpleNamespace(_config_class=dict), None) == {}


@each_trainer
def test_arguments_are_taken_in_trls_order(cls, path, tmp_path):
    given = [path, reward, settings_of(cls, tmp_path / "out")]
    with pytest.raises(AssertionError, match=STARTED):
        cls(*given, PROMPTS, None, tiny_tokenizer())
    with pytest.raises(ValueError, match=r"\['prompt'\] not in the dataset"):
        cls(*given, PROMPTS, PROMPTS.remove_columns("prompt"), tiny_tokenizer())
    with pytest.raises(TypeError) as error:
        cls(*given, train_dataset=PROMPTS, tokenizer=tiny_tokenizer())
    assert str(error.value).startswith(f"{cls.__name__}.__init__() got an unexpected keyword arg")
    # what help and editors show
    parent = RLOOTrainer if cls is QuRLRLOOTrainer else GRPOTrainer
    theirs = inspect.signature(parent).parameters
    assert theirs.items() <= inspect.signature(cls).parameters.items()


def test_a_trainer_prints_what_a_run_will_do(built, tmp_path, capsys):
    settings = {"num_generations": 8, "per_device_train_batch_size": 16, "steps_per_generation": 8}
    args = settings_of(QuRLGRPOTrainer, tmp_path, **settings, gradient_accumulation_steps=4)
    trainer = built(args=args)
    for is_first in (True, False):
        trainer.state = TrainerState(max_steps=4, is_world_process_zero=is_first)
        trainer.callback_handler.on_train_begin(args, trainer.state, trainer.control)
        trainer._run_log.close()
    end_log(tmp_path / RUN_LOG)
    # 16 x 8 = 128 answers to 128 / 8 = 16 questions; 8 / 4 = 2 updates; 4 / 2 = 2 rollouts
    assert capsys.readouterr().out == (
        "4 steps: 2 INT8 rollouts of 128 answers (questions x answers: 16 x 8),\n"
        "up to 16 tokens, updates each: 2 (acr)\n"
    )


def test_vespo_needs_a_mode_per_token_as_in_trl(attempt):
    args = {"loss_type": "vespo", "objective": "tis"}
    assert "'token_truncate' or" in attempt(args=args)
    assert attempt(args=args | {"vllm_importance_sampling_mode": "token_truncate"}) == STARTED


def test_an_adapter_is_not_a_model(attempt, tmp_path):
    adapter = tmp_path / "adapter"
    get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
    assert_names(attempt(model=str(adapter)), str(adapter), "PeftModel", "is_trainable")


@each_trainer
def test_a_directory_in_which_another_run_trains_is_refused(cls, attempt, tmp_path):
    begin_log(tmp_path / RUN_LOG, {})
    assert str(tmp_path) in attempt(cls)
    end_log(tmp_path / RUN_LOG)


# Columns
# --------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "1+1"}
QUESTIONS = PROMPTS.rename_column("prompt", "question")
NO_PROMPT = ("['prompt'] not in the dataset", "'question', 'solution'")
CAUSAL = {"task_type": "CAUSAL_LM"}
ADAPTERS = {
    "PrefixTuningConfig (PREFIX_TUNING)": PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "LoraConfig (alora_invocation_tokens)": LoraConfig(alora_invocation_tokens=[40], **CAUSAL),
    # shares tensors among layers
    "VeraConfig (VERA)": VeraConfig(r=4, target_modules=["q_proj"], **CAUSAL),
}


def test_data_and_adapters_that_cannot_train_are_refused(attempt):
    assert_names(attempt(data=QUESTIONS), *NO_PROMPT)
    evaluation = DatasetDict(easy=PROMPTS, hard=QUESTIONS)
    assert_names(attempt(eval_dataset=evaluation), *NO_PROMPT)
    assert "train_dataset[15] has no tokens" in attempt(data=prompts("ab", ""))
    assert_names(attempt(data=prompts("ab", None)), "train_dataset[15]", "None")
    assert_names(attempt(data=prompts([USER], [])), "train_dataset[15]", "[]")
    for name, config in ADAPTERS.items():
        assert_names(attempt(peft_config=config), name, "LoRA")
        assert_names(attempt(model=get_peft_model(tiny_model(), config)), name, "LoRA")


def test_columns_are_known_when_rows_are_read(attempt):
    """Those of a stream, and of a transform."""
    stream = PROMPTS.to_iterable_dataset().map(lambda row: row)
    made = QUESTIONS.with_transform(lambda rows: rows | {"prompt": rows["question"]})
    assert attempt(data=stream) == STARTED
    assert attempt(data=made, eval_dataset=made) == STARTED


# Prompts
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch, tmp_path):
    """Builds a trainer with an engine that holds twenty tokens, of which a completion may take
    sixteen.
    """
    MultiProcessAdapter.warning_once.cache_clear()
    started = {"kept": (), "context": 20}
    monkeypatch.setattr(INIT, lambda self: vars(self).update(started))
    return functools.partial(build, QuRLGRPOTrainer, tmp_path)


def test_all_prompts_are_measured_in_tokens(built, attempt):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["long word "])
    given = {"processing_class": tokenizer, "model": tiny_model(vocab_size=110)}
    few_tokens = "long word " * 5
    built(data=prompts(few_tokens, "a"), **given)
    evaluation = DatasetDict(easy=PROMPTS, hard=prompts(few_tokens, "a" * 20))
    message = attempt(eval_dataset=evaluation, **given)
    assert_names(message, "eval_dataset['hard'][15] of 20 tokens", "--max-model-len")


@each_trainer
def test_prompts_are_measured_before_the_engine_starts_if_the_context_is_set(cls, attempt, path):
    def attempt_with(context):
        args = {"vllm_max_model_length": context}
        # a critic starts from a path
        return attempt(cls, args=args, model=path, data=LONG)

    assert "train_dataset[15] of 20 tokens" in attempt_with(20)
    assert attempt_with(21) == STARTED


@pytest.mark.parametrize(("length", "is_warned_of"), [(None, False), (1, False), (2, True)])
def test_completions_that_end_early_are_warned_of(length, is_warned_of, attempt, caplog):
    """The longest prompt leaves room for one token. A length of `None` is all that is left."""
    MultiProcessAdapter.warning_once.cache_clear()
    args = {"vllm_max_model_length": 21, "max_completion_length": length}
    assert attempt(args=args, data=LONG) == STARTED
    warnings = [text for text in caplog.messages if "Long prompts" in text]
    if is_warned_of:
        [warning] = warnings
        assert f"max_completion_length={length}" in warning
    else:
        assert not warnings


def test_a_part_of_a_large_dataset_is_measured(built, attempt, monkeypatch):
    monkeypatch.setattr("trl_qurl.trainers.checks.prompts.MEASURED", 15)
    monkeypatch.setattr("trl_qurl.trainers.checks.prompts.BATCH", 4)
    built(data=LONG)
    earlier = LONG.select([*range(13), 15, 15])
    assert "train_dataset[13] of 20 tokens" in attempt(data=earlier)


def tokenizer_that_adds(single):
    """The tiny tokenizer, which surrounds each text `$A` with special tokens, and a template for
    chats.
    """
    tokenizer = tiny_tokenizer(["<pad>", "<eos>", "<bos>", *VOCABULARY[2:-1]], bos_token="<bos>")
    special = [("<eos>", 1), ("<bos>", 2)]
    processor = TemplateProcessing(single=single, special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    return tokenizer


ASSISTANT = {"role": "assistant", "content": "2"}
DOUBTFUL = {
    # The tokenizer ends the plain texts, too.
    "an end": ("$A <eos>", "a", "16 prompts, the first of which is train_dataset[0], end"),
    "an end that is meant": ("$A <eos>", "ab<eos>", "14 prompts, "),
    "two starts": ("<bos> $A", "<bos>ab", "2 prompts, the first of which is train_dataset[14]"),
    "one start": ("<bos> $A", "ab", None),
    "an answer": ("$A", [USER, ASSISTANT], "assistant's turn"),
    "a question": ("$A", [USER, ASSISTANT, USER], None),
}


@pytest.mark.parametrize(("single", "prompt", "message"), DOUBTFUL.values(), ids=DOUBTFUL)
def test_prompts_that_the_policy_would_not_answer_get_a_warning(
    single, prompt, message, built, caplog
):
    plain = "cd" if isinstance(prompt, str) else [USER]
    data = Dataset.from_dict({"prompt": [*[plain] * 14, prompt, prompt]})
    built(data=data, processing_class=tokenizer_that_adds(single))
    warnings = [text for text in caplog.messages if "the first of which is" in text]
    if message is None:
        assert not warnings
    else:
        [warning] = warnings
        assert message in warning


def test_a_token_beyond_the_embedding_is_refused_if_a_prompt_has_it(attempt, tmp_path):
    tiny_model(vocab_size=98).save_pretrained(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<t{number}>" for number in range(9)])
    given = {"model": f"{tmp_path}/model", "processing_class": tokenizer}
    # 106 tokens, of which no prompt has the last eight
    assert attempt(data=prompts("ab", "a<t0>"), **given) == STARTED
    message = attempt(data=prompts("ab", "a<t1>"), **given)
    assert_names(message, "'<t1>'", "train_dataset[15]", "98 rows", "resize_token_embeddings")
    tokenizer.add_special_tokens({"pad_token": "<t8>"})
    assert_names(attempt(**given), "'<t8>'", "padding token", "105", "98 rows")


# The policy
# --------------------------------------------------------------------------------------------------


def test_a_policy_that_nothing_trains_is_refused(attempt):
    lora = LoraConfig(target_modules=["q_proj"])
    frozen = LoraConfig(target_modules=["q_proj"], inference_mode=True)
    refused = "no trainable parameter"
    for given in ({"model": get_peft_model(tiny_model(), frozen)}, {"peft_config": frozen}):
        assert_names(attempt(**given), refused, "is_trainable=True", "inference_mode=False")
    adapted = get_peft_model(tiny_model(), lora)
    assert attempt(model=adapted) == STARTED
    merged = attempt(model=adapted.merge_and_unload())
    assert_names(merged, refused, "requires_grad_", "merge_and_unload")


def test_a_generation_config_that_cannot_be_saved_is_refused(attempt, path):
    settings = '{"temperature": 0.6, "do_sample": false}'
    Path(path, "generation_config.json").write_text(settings)
    assert_names(attempt(model=path), "`temperature`", "generation_config.json")


def test_a_reference_that_is_not_the_policy_is_warned_of(built, path, tmp_path, caplog):
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    args = settings_of(QuRLGRPOTrainer, tmp_path, beta=0.1, objective="tis")
    assert built(args=args, model=policy).ref_model is not None
    assert "The reference" not in caplog.text, "it is the policy in float32"
    policy.model.norm.weight.data += 1
    built(args=args, model=policy)
    assert "first in model.norm.weight" in caplog.text


def test_a_run_on_a_cpu_that_is_too_short_is_not_compiled(tmp_path, monkeypatch):
    size = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 50,
    }

    def is_eager(max_steps, **given):
        changes = {"max_steps": max_steps, "vllm_engine_kwargs": given}
        args = settings_of(QuRLGRPOTrainer, tmp_path, **size, **changes)
        return rollout_settings(args).vllm_engine_kwargs.get("enforce_eager")

    monkeypatch.setattr("trl_qurl.trainers.arguments.gpu_capability", lambda: None)
    assert is_eager(74) is True
    assert is_eager(75) is None  # 8 answers of 50 tokens a step are 30,000 tokens
    assert is_eager(-1) is None
    assert is_eager(74, enforce_eager=False) is False
    monkeypatch.setattr("trl_qurl.trainers.arguments.gpu_capability", lambda: (9, 0))
    assert is_eager(74) is None


class Told(RolloutCallback):
    def on_engine(self):
        self.context = self.trainer.vllm_generation.context


@pytest.mark.parametrize("given", [Told, Told()], ids=["class", "instance"])
def test_checks_of_users_get_the_events_of_the_start(given, built):
    assert built(callbacks=[given]).pop_callback(Told).context == 20


def test_a_damaged_checkpoint_is_named(built, tmp_path):
    trainer = built()
    checkpoint = tmp_path / "checkpoint-1"
    trainer.model.save_pretrained(checkpoint)
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(Exception) as error:  # noqa: PT011  # of whichever library reads it
        trainer._load_from_checkpoint(str(checkpoint))
    [note] = error.value.__notes__
    assert str(checkpoint) in note
    assert "earlier checkpoint" in note
