"""What a trainer is given, in TRL's order and by name: taken as TRL takes it, or refused before an engine starts."""

import functools

import pytest
from datasets import Dataset, DatasetDict
from peft import AdaptionPromptConfig, LoraConfig, PolyConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tiny import tiny_model, tiny_tokenizer

from trl_qurl import (
    QuRLGRPOConfig,
    QuRLGRPOTrainer,
    QuRLPPOConfig,
    QuRLPPOTrainer,
    QuRLRLOOConfig,
    QuRLRLOOTrainer,
)
from trl_qurl.trainers.arguments import check_plain_generation

PLAIN = {
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "num_generations": 2,
    "steps_per_generation": 2,
    "max_steps": 1,
    "max_completion_length": 16,
}
TRAINERS = [
    (QuRLGRPOTrainer, QuRLGRPOConfig),
    (QuRLRLOOTrainer, QuRLRLOOConfig),
    (QuRLPPOTrainer, QuRLPPOConfig),
]
PROMPTS = Dataset.from_dict({"prompt": ["ab"] * 16, "solution": ["c"] * 16})
STARTED = "an engine was started"
"""All that is checked before was right."""


def reward(completions, **kwargs):
    return [0.0] * len(completions)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    def start(self):
        raise AssertionError(STARTED)

    monkeypatch.setattr("trl_qurl.rollout.backend.QuantizedVLLMGeneration._init_vllm", start)


def build(kind, config, tmp_path, *, function=reward, data=PROMPTS, model=None, **given):
    settings = config(str(tmp_path), **PLAIN)
    start = tiny_model() if model is None else model
    return kind(start, function, settings, train_dataset=data, processing_class=tiny_tokenizer(), **given)


@pytest.mark.parametrize(("kind", "config"), TRAINERS)
def test_arguments_are_taken_in_trls_order(kind, config, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    given = [str(tmp_path / "model"), reward, config(str(tmp_path / "out"), **PLAIN)]
    with pytest.raises(AssertionError, match=STARTED):
        kind(*given, PROMPTS, None, tiny_tokenizer())
    with pytest.raises(ValueError, match="eval_dataset has no column 'prompt'"):
        kind(*given, PROMPTS, PROMPTS.remove_columns("prompt"), tiny_tokenizer())
    with pytest.raises(TypeError, match="multiple values for argument 'train_dataset'"):
        kind(*given, PROMPTS, train_dataset=PROMPTS)
    with pytest.raises(TypeError, match="too many positional arguments"):
        kind(*given, *[None] * 20)


@pytest.mark.parametrize(("kind", "config"), TRAINERS)
@pytest.mark.parametrize("streamed", [False, True])
def test_data_without_prompts_is_refused(kind, config, streamed, tmp_path):
    data = Dataset.from_dict({"question": ["ab"] * 16, "answer": ["c"] * 16})
    data = data.to_iterable_dataset() if streamed else data
    message = (
        r"train_dataset has no column 'prompt', only 'question', 'answer': rename one with "
        r"dataset\.rename_column\('question', 'prompt'\), or make one with dataset\.map\("
    )
    with pytest.raises(ValueError, match=message):
        build(kind, config, tmp_path, data=data)


def test_data_to_evaluate_on_needs_prompts_as_well(tmp_path):
    data = DatasetDict(easy=PROMPTS, hard=PROMPTS.rename_column("prompt", "question"))
    with pytest.raises(ValueError, match="hard has no column 'prompt', only 'question', 'solution'"):
        build(QuRLGRPOTrainer, QuRLGRPOConfig, tmp_path, eval_dataset=data)


def test_a_stream_whose_columns_are_unknown_is_read_first(tmp_path):
    stream = PROMPTS.to_iterable_dataset().map(lambda row: row)
    assert stream.column_names is None
    with pytest.raises(AssertionError, match=STARTED):
        build(QuRLGRPOTrainer, QuRLGRPOConfig, tmp_path, data=stream)


class Judge:
    __name__ = "judge"

    def __call__(self, prompts, completions):
        return [0.0] * len(completions)


async def asks(completions, texts, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize(("kind", "config"), TRAINERS)
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
def test_a_reward_function_that_trl_cannot_call_is_refused(kind, config, function, message, tmp_path):
    passed = "it passes prompts, completions, completion_ids, trainer_state, log_extra, log_metric, solution by name"
    with pytest.raises(TypeError, match=rf"TRL cannot call the reward function {message}.*: {passed}"):
        build(kind, config, tmp_path, function=function)


@pytest.mark.parametrize(
    "function",
    [
        reward,
        lambda prompts, completions, completion_ids, trainer_state, log_extra, log_metric, solution: [],
        lambda completions, solution, optional=None, **kwargs: [],
        [reward, lambda **kwargs: []],
    ],
)
def test_a_reward_function_that_trl_can_call_is_taken(function, tmp_path):
    with pytest.raises(AssertionError, match=STARTED):
        build(QuRLGRPOTrainer, QuRLGRPOConfig, tmp_path, function=function)


def with_judge(completions, judge, **kwargs):
    return [judge(completion) for completion in completions]


def supplies_judge(function):
    @functools.wraps(function)
    def wrapped(completions, **kwargs):
        return function(completions, judge=len, **kwargs)

    return wrapped


PARTIAL = functools.partial(with_judge, judge=len)


@pytest.mark.parametrize(
    "function", [PARTIAL, functools.update_wrapper(PARTIAL, with_judge), supplies_judge(with_judge)]
)
def test_a_wrapped_reward_function_takes_what_the_wrapper_takes(function, tmp_path):
    with pytest.raises(AssertionError, match=STARTED):
        build(QuRLGRPOTrainer, QuRLGRPOConfig, tmp_path, function=function)


def test_a_wrapper_that_trl_cannot_call_is_refused(tmp_path):
    @functools.wraps(reward)
    def wrapped(samples, **kwargs):
        return reward(samples, **kwargs)

    with pytest.raises(TypeError, match="'reward' .missing a required argument: 'samples'"):
        build(QuRLGRPOTrainer, QuRLGRPOConfig, tmp_path, function=wrapped)


def test_columns_are_those_that_a_transform_makes(tmp_path):
    grpo = (QuRLGRPOTrainer, QuRLGRPOConfig, tmp_path)
    stored = Dataset.from_dict({"question": ["ab"] * 16})
    made = stored.with_transform(lambda rows: {"prompt": rows["question"], "solution": rows["question"]})
    with pytest.raises(AssertionError, match=STARTED):
        build(*grpo, data=made, eval_dataset=made, function=lambda completions, solution, **kwargs: [])
    gone = PROMPTS.with_transform(lambda rows: {"question": rows["prompt"]})
    with pytest.raises(ValueError, match="train_dataset has no column 'prompt', only 'question': "):
        build(*grpo, data=gone)
    pictures = PROMPTS.with_transform(lambda rows: rows | {"image": rows["prompt"]})
    with pytest.raises(ValueError, match="dynamic_sampling=True does not work with images"):
        check_plain_generation({"train_dataset": pictures}, "dynamic_sampling=True")


@pytest.fixture
def small_context(monkeypatch):
    """An engine that holds twenty tokens, of which a completion may take sixteen."""
    started = {"kept": (), "context": 20}
    monkeypatch.setattr(
        "trl_qurl.rollout.backend.QuantizedVLLMGeneration._init_vllm", lambda self: vars(self).update(started)
    )


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
def test_prompts_that_cannot_be_continued_are_found_before_training(split, prompt, message, small_context, tmp_path):
    data = Dataset.from_dict({"prompt": [*["abcd"] * 15, prompt]})
    with pytest.raises(ValueError, match=message):
        build(QuRLGRPOTrainer, QuRLGRPOConfig, tmp_path, **{split: data})


def test_prompts_that_end_completions_early_are_warned_of(small_context, caplog, tmp_path):
    def warnings(prompt):
        caplog.clear()
        build(QuRLGRPOTrainer, QuRLGRPOConfig, tmp_path, data=Dataset.from_dict({"prompt": [prompt] * 16}))
        return [record.getMessage() for record in caplog.records if "Long prompts" in record.getMessage()]

    assert not warnings("abcd")
    [warning] = warnings("abcde")
    assert "end completions before max_completion_length=16, because both share the context of 20 tokens" in warning


def test_what_a_rollout_function_adds_may_be_asked_for(tmp_path):
    given = {"rollout_func": lambda prompts, trainer: {}, "function": lambda completions, score, **kwargs: []}
    with pytest.raises(AssertionError, match=STARTED):
        build(QuRLGRPOTrainer, QuRLGRPOConfig, tmp_path, **given)


@pytest.mark.parametrize(("kind", "config"), TRAINERS)
@pytest.mark.parametrize(
    ("method", "name"),
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), r"PromptTuningConfig \(PROMPT_TUNING\)"),
        (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), r"PrefixTuningConfig \(PREFIX_TUNING\)"),
        (LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[40]), r"LoraConfig \(alora_invocation_tokens\)"),
        (LoraConfig(task_type="CAUSAL_LM", trainable_token_indices=[5]), r"LoraConfig \(trainable_token_indices\)"),
    ],
    ids=["prompt", "prefix", "aLoRA", "tokens"],
)
def test_an_adapter_that_cannot_be_merged_is_refused(kind, config, method, name, tmp_path):
    message = rf"{name} is a PEFT method that cannot be merged into the weights, .*: use LoRA"
    with pytest.raises(ValueError, match=message):
        build(kind, config, tmp_path, peft_config=method)
    with pytest.raises(ValueError, match=message):
        build(kind, config, tmp_path, model=get_peft_model(tiny_model(), method))


@pytest.mark.parametrize("method", [AdaptionPromptConfig(), PolyConfig()], ids=["adaption prompt", "Poly"])
def test_a_method_that_cannot_be_undone_is_refused(method, tmp_path):
    with pytest.raises(ValueError, match=rf"{type(method).__name__} .* cannot be merged into the weights"):
        build(QuRLGRPOTrainer, QuRLGRPOConfig, tmp_path, peft_config=method)
