"""Arguments of a trainer, in TRL's order and by name: used as TRL uses them, or refused before an engine starts."""

import functools

import pytest
from datasets import Dataset, DatasetDict
from peft import LNTuningConfig, LoraConfig, PrefixTuningConfig, PromptTuningConfig, VeraConfig, get_peft_model
from support.building import CONFIGS, PROMPTS, STARTED, build, reward, settings_of, start_no_engine
from tiny import tiny_model, tiny_tokenizer

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


@each_trainer
def test_an_adapter_is_not_a_model(cls, tmp_path):
    get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=f"{tmp_path}/adapter holds an adapter.*PeftModel.*is_trainable=True"):
        build(cls, tmp_path, model=str(tmp_path / "adapter"))


@each_trainer
def test_a_home_directory_is_written_out(cls, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_model().save_pretrained(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match="~/model does not exist: .* home directory"):
        build(cls, tmp_path, model="~/model")


@each_trainer
def test_a_directory_in_which_another_run_trains_is_refused(cls, tmp_path):
    begin_log(tmp_path / RUN_LOG, {})
    with pytest.raises(RuntimeError, match=f"Another run is training with the output directory {tmp_path}"):
        build(cls, tmp_path)
    end_log(tmp_path / RUN_LOG)


@each_trainer
@pytest.mark.parametrize("streamed", [False, True])
def test_data_without_prompts_is_refused(cls, streamed, tmp_path):
    data = Dataset.from_dict({"question": ["ab"] * 16, "answer": ["c"] * 16})
    data = data.to_iterable_dataset() if streamed else data
    message = (
        r"train_dataset has no column 'prompt', only 'question', 'answer': rename one with "
        r"dataset\.rename_column\('question', 'prompt'\), or make one with dataset\.map\("
    )
    with pytest.raises(ValueError, match=message):
        build(cls, tmp_path, data=data)


def test_data_for_evaluation_needs_prompts_too(tmp_path):
    data = DatasetDict(easy=PROMPTS, hard=PROMPTS.rename_column("prompt", "question"))
    with pytest.raises(ValueError, match="hard has no column 'prompt', only 'question', 'solution'"):
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


@each_trainer
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda samples, **kwargs: [], r"'<lambda>' \(missing a required argument: 'samples'\)"),
        (lambda completions, answer, **kwargs: [], r"'<lambda>' \(missing a required argument: 'answer'\)"),
        (lambda completions: [], r"'<lambda>' \(got an unexpected keyword argument 'prompts'\)"),
        (lambda completions, /, **kwargs: [], r"'<lambda>' \(.*'completions'"),
        (Judge(), r"'judge' \(got an unexpected keyword argument 'completion_ids'\)"),
        (asks, r"'asks' \(missing a required argument: 'texts'\)"),
        ([reward, lambda x: []], "'<lambda>'"),
    ],
)
def test_a_reward_function_that_trl_cannot_call_is_refused(cls, function, message, tmp_path):
    passed = "it passes prompts, completions, completion_ids, trainer_state, log_extra, log_metric, solution by name"
    with pytest.raises(TypeError, match=rf"TRL cannot call the reward function {message}.*: {passed}"):
        build(cls, tmp_path, function=function)


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
    "all names": lambda prompts, completions, completion_ids, trainer_state, log_extra, log_metric, solution: [],
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

    with pytest.raises(TypeError, match="'reward' .missing a required argument: 'samples'"):
        grpo(tmp_path, function=wrapped)


def test_columns_are_those_of_a_transform(tmp_path):
    stored = Dataset.from_dict({"question": ["ab"] * 16})
    made = stored.with_transform(lambda rows: {"prompt": rows["question"], "solution": rows["question"]})
    with pytest.raises(AssertionError, match=STARTED):
        grpo(tmp_path, data=made, eval_dataset=made, function=lambda completions, solution, **kwargs: [])
    gone = PROMPTS.with_transform(lambda rows: {"question": rows["prompt"]})
    with pytest.raises(ValueError, match="train_dataset has no column 'prompt', only 'question': "):
        grpo(tmp_path, data=gone)
    images = PROMPTS.with_transform(lambda rows: rows | {"image": rows["prompt"]})
    with pytest.raises(ValueError, match="dynamic_sampling=True does not work with images"):
        check_plain_generation({"train_dataset": images}, "dynamic_sampling=True")


@pytest.fixture
def small_context(monkeypatch):
    """An engine that holds twenty tokens, of which a completion may take sixteen."""
    started = {"kept": (), "context": 20}
    monkeypatch.setattr(INIT, lambda self: vars(self).update(started))


@pytest.mark.parametrize("split", ["data", "eval_dataset"])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            "a" * 20,
            "A prompt of 20 tokens fills the context of 20 tokens .vllm_max_model_length; of a server, --max-m",
        ),
        ("", "A prompt has no tokens, so there is nothing to continue: remove it from the dataset"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(split, prompt, message, small_context, tmp_path):
    data = Dataset.from_dict({"prompt": [*["abcd"] * 15, prompt]})
    with pytest.raises(ValueError, match=message):
        grpo(tmp_path, **{split: data})


def test_prompts_that_leave_too_little_context_get_a_warning(small_context, caplog, tmp_path):
    def warnings(prompt):
        caplog.clear()
        grpo(tmp_path, data=Dataset.from_dict({"prompt": [prompt] * 16}))
        return [record.getMessage() for record in caplog.records if "Long prompts" in record.getMessage()]

    assert not warnings("abcd")
    [warning] = warnings("abcde")
    assert "end completions before max_completion_length=16, because both share the context of 20 tokens" in warning


def test_reward_functions_may_take_what_a_rollout_function_adds(tmp_path):
    given = {"rollout_func": lambda prompts, trainer: {}, "function": lambda completions, score, **kwargs: []}
    with pytest.raises(AssertionError, match=STARTED):
        grpo(tmp_path, **given)


CAUSAL = {"task_type": "CAUSAL_LM"}
NOT_MERGED = {
    r"PromptTuningConfig \(PROMPT_TUNING\)": PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    r"PrefixTuningConfig \(PREFIX_TUNING\)": PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    r"LoraConfig \(alora_invocation_tokens\)": LoraConfig(alora_invocation_tokens=[40], **CAUSAL),
    r"LoraConfig \(trainable_token_indices\)": LoraConfig(trainable_token_indices=[5], **CAUSAL),
    r"LNTuningConfig \(LN_TUNING\)": LNTuningConfig(target_modules=["norm"], **CAUSAL),  # swaps modules
    r"VeraConfig \(VERA\)": VeraConfig(r=4, target_modules=["q_proj"], **CAUSAL),  # shares tensors among layers
}
REFUSED = " is a PEFT method that cannot be merged into the weights, .*: use LoRA"


@each_trainer
@pytest.mark.parametrize("name", NOT_MERGED)
def test_an_adapter_that_cannot_be_merged_is_refused(cls, name, tmp_path):
    for given in ({"peft_config": NOT_MERGED[name]}, {"model": get_peft_model(tiny_model(), NOT_MERGED[name])}):
        with pytest.raises(ValueError, match=name + REFUSED):
            build(cls, tmp_path, **given)


@each_trainer
def test_a_run_on_a_cpu_that_is_too_short_is_not_compiled(cls, tmp_path, monkeypatch):
    def eager(**changed):
        size = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 50}
        args = settings_of(cls, tmp_path, **size | changed)
        return rollout_settings(args).engine_kwargs.get("enforce_eager", "vLLM's default")

    assert WORTH_COMPILING == 30_000, "answers of the runs below"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert eager(max_steps=74) is True and eager(max_steps=75) == eager(max_steps=-1) == "vLLM's default"
    assert eager(max_steps=1, vllm_engine_kwargs={"enforce_eager": False}) is False
    monkeypatch.setattr("trl_qurl.trainers.arguments.gpu_capability", lambda: (9, 0))
    assert eager(max_steps=1) == "vLLM's default"
