"""Recipes: they parse, repeat the paper's settings (ours fit in
memory), and run on real questions.
"""

import itertools
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import yaml
from tiny import ENGINE, SHARED, save_tiny

import trl_qurl
from trl_qurl.lab import grading
from trl_qurl.lab.recipes import questions
from trl_qurl.lab.recipes.arguments import parse, recipes
from trl_qurl.lab.recipes.rewards import load_rewards, punishment
from trl_qurl.lab.runs import read_run

HERE = Path(trl_qurl.__file__).parent / "lab" / "recipes"
RECIPES = sorted((HERE / "paper").glob("*.yaml"))
VARIANTS = sorted((HERE / "paper" / "variants").glob("*.yaml"))
OWN = sorted((HERE / "own").glob("*.yaml"))
ON_CPU = "--use_cpu --bf16 false"

PAPER = """\
dapo: Qwen/Qwen2.5-Math-7B becomes qurl-dapo
  200.0 rollouts of 1024 answers to 64 questions
  up to 3072 tokens, at a temperature of 1.0
  16.0 updates at 1e-06, beta 0.0; a row every 16
  int8, acr, s = 1.5
  aime24 after every 20.0 rollouts
deepscaler_16k: qurl-deepscaler-8k becomes qurl-deepscaler-16k
  400.0 rollouts of 512 answers to 32 questions
  up to 16384 tokens, at a temperature of 0.6
  4.0 updates at 1e-06, beta 0.001; a row every 4
  int8, acr, s = 1.5
  aime24 after every 50.0 rollouts
deepscaler_24k: qurl-deepscaler-16k becomes qurl-deepscaler-24k
  400.0 rollouts of 512 answers to 32 questions
  up to 24576 tokens, at a temperature of 0.6
  4.0 updates at 1e-06, beta 0.001; a row every 4
  int8, acr, s = 1.5
  aime24 after every 50.0 rollouts
deepscaler_8k: deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B becomes qurl-deepscaler-8k
  800.0 rollouts of 256 answers to 32 questions
  up to 8192 tokens, at a temperature of 0.6
  4.0 updates at 1e-06, beta 0.001; a row every 4
  int8, acr, s = 1.5
  aime24 after every 50.0 rollouts
gsm8k_ppo: Qwen/Qwen2.5-0.5B-Instruct becomes qurl-gsm8k-ppo
  435.0 rollouts of 256 answers to 256 questions
  up to 512 tokens, at a temperature of 1.0
  4.0 updates at 1e-05, beta 0.0; a row every 4
  int8, acr, s = 1.0
  gsm8k after every 29.0 rollouts"""
"""In a process, of which the recipes of the paper but that of PPO have eight."""
VARIANT_SETTINGS = """\
bf16: None, naive, s = 1.0
naive: int8, naive, s = 1.0
qurl: int8, acr, s = 1.5
qurl_without_uaq: int8, acr, s = 1.0
tis: int8, tis, s = 1.0"""
GSM8K = ("gsm8k/train", "gsm8k/test")
DATA = {
    "gsm8k_ppo": GSM8K,
    "lora_w4": GSM8K,
    "rloo": GSM8K,
    "dapo": ("dapo_math_17k/train", "aime2024/test"),
}
DEEPSCALER = ("deepscaler/train_subset", "aime2024/test")


needs_data = pytest.mark.skipif(
    not (SHARED / "data").exists(), reason="the data sets are not beside this checkout"
)


def command_of(recipe):
    return "ppo" if recipe.stem.endswith("ppo") else "grpo"


def parsed(command, argv):
    """Script, trainer and model arguments of `trl-qurl COMMAND` on a CPU."""
    return parse(command, f"{ON_CPU} {argv}".split())


def write(path, **settings):
    path.write_text(yaml.safe_dump(settings))
    return path


def test_recipes_and_variants_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tis").mkdir()  # a directory of that name is not a settings file
    mine = write(tmp_path / "mine.yaml", seed=7, objective="naive", model="my/model", lora_r=8)
    files = f"--config gsm8k_ppo {mine} tis"
    _, config, model = parsed("ppo", f"{files} --lora_r 4")
    assert model.model_name_or_path == "my/model"
    assert (config.max_steps, config.seed, model.lora_r) == (1740, 7, 4)
    assert parsed("ppo", f"{files} --model other")[2].model_name_or_path == "other"
    assert config.objective == "tis", "later files override earlier ones"
    assert [*recipes()] == [path.stem for path in (*RECIPES, *VARIANTS, *OWN)]
    write(tmp_path / "dapo", seed=8)
    assert parsed("grpo", "--config dapo")[1].seed == 8, "a local file comes first"


def test_recipes_have_the_settings_of_the_paper():
    said = []
    for recipe in RECIPES:
        script, config, model = parsed(command_of(recipe), f"--config {recipe}")
        made = config.per_device_train_batch_size * config.steps_per_generation
        updates = config.updates_per_rollout
        said += [
            f"{recipe.stem}: {model.model_name_or_path} becomes {config.output_dir}",
            f"  {config.max_steps // updates} rollouts of {made} answers to {made // config.num_generations} questions",
            f"  up to {config.max_completion_length} tokens, at a temperature of {config.temperature}",
            f"  {updates} updates at {config.learning_rate}, beta {config.beta}; a row every {config.logging_steps}",
            f"  {config.rollout_quantization}, {config.objective}, s = {config.uaq_scale}",
            f"  {' '.join(script.eval_tasks)} after every {script.eval_tasks_steps / updates} rollouts",
        ]
    assert "\n".join(said) == PAPER


def test_dapo_is_dapo():
    script, config, _ = parsed("grpo", "--config dapo")
    clips = (config.epsilon, config.epsilon_high, config.mask_truncated_completions)
    assert clips == (0.2, 0.28, True)
    assert config.loss_type == "dapo"
    assert config.dynamic_sampling
    assert config.dynamic_sampling_reward == "accuracy_reward"
    punish = punishment(script.soft_overlong_cache, config.max_completion_length)
    # DAPO, Eq. 13, with 3072 tokens and 614 of them before the limit: -(2765 - 2458) / 614 = -0.5.
    rewards = punish(completion_ids=[[0] * 2458, [0] * 2765, [0] * 3072])
    assert rewards == pytest.approx([0.0, -0.5, -1.0])
    for cache in (0, 100):
        with pytest.raises(ValueError, match=f"cache={cache} .* max_completion_length=100"):
            punishment(cache, 100)
    assert punishment(1, 100)


def test_variants_of_a_recipe():
    said = []
    for variant in VARIANTS:
        _, config, _ = parsed("grpo", f"--config dapo {variant}")
        assert config.max_completion_length == 3072, "the recipe's"
        said.append(
            f"{variant.stem}: {config.rollout_quantization}, {config.objective}, s = {config.uaq_scale}"
        )
    assert "\n".join(said) == VARIANT_SETTINGS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with a tokenizer, saved."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return save_tiny(
        tmp_path_factory.mktemp("model"),
        template,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def run_of(command, name, model, directory, further=""):
    """The arguments with which the scenario runs two steps of a tiny model on real questions."""
    train, test = (SHARED / "data" / f"{data}.jsonl.gz" for data in DATA.get(name, DEEPSCALER))
    engine = json.dumps(ENGINE, separators=(",", ":"))
    argv = f"""
        {ON_CPU} {further} --model_name_or_path {model} --max_steps 2 --dataset {train} --dataset_limit 12
        --question_column question --answer_column answer
        --eval_tasks held_out={test} --eval_tasks_limit 3 --eval_tasks_steps 2
        --output_dir {directory / name} --logging_steps 1 --save_strategy no
        --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --steps_per_generation 2
        --num_generations {1 if command == "ppo" else 4} --max_completion_length 6
        --report_to none --vllm_max_model_length 4096 --vllm_engine_kwargs {engine}
        --sync_check_interval 0
    """
    if name == "dapo":
        argv += "--soft_overlong_cache 3"
    if name in ("deepscaler_16k", "lora_w4", "rloo"):
        argv += "--save_quantized True"
    return [command, name, json.dumps(argv.split())]


@pytest.fixture(scope="module")
def two_steps(run_scenario, model, tmp_path_factory):
    """Every recipe of the paper for two steps, each with another variant; what was logged."""
    directory = tmp_path_factory.mktemp("runs")
    runs = []
    for recipe, variant in zip(RECIPES, itertools.cycle(VARIANTS)):
        config = f"--config {recipe} {variant}"
        runs.append(run_of(command_of(recipe), recipe.stem, model, directory, config))
    # RLOO has no recipe of the paper's, and runs with its command's defaults.
    runs.append(run_of("rloo", "rloo", model, directory))
    return directory, run_scenario("recipes.py", *itertools.chain(*runs))


def assert_two_updates(record):
    updates = [row for row in record["history"] if "loss" in row]
    assert len(updates) == 2
    assert all(row["loss"] == row["loss"] for row in updates)


@pytest.mark.vllm
@pytest.mark.slow
@needs_data
def test_an_adapter_on_a_base_in_four_bits_trains(run_scenario, model, tmp_path):
    run = run_of("grpo", "lora_w4", model, tmp_path, "--config lora_w4")
    assert_two_updates(run_scenario("recipes.py", *run)["lora_w4"])
    assert (tmp_path / "lora_w4" / "adapter_model.safetensors").exists()
    assert (tmp_path / "lora_w4-w4a16" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.vllm
@pytest.mark.xdist_group("recipes")
@needs_data
@pytest.mark.parametrize("name", [*(path.stem for path in RECIPES), "rloo"])
def test_two_steps_on_the_real_questions(name, two_steps):
    directory, records = two_steps
    record = records[name]
    assert_two_updates(record)
    [rollout] = [row for row in record["history"] if "reward" in row]
    assert rollout["num_tokens"] > 100
    assert "rewards/accuracy_reward/mean" in rollout
    metric = "eval_held_out/actor_avg@1"
    evaluations = [row["step"] for row in record["history"] if metric in row]
    assert evaluations == [0, 2], "a benchmark before the first step and after the second"
    assert (directory / name / "config.json").exists()
    quantized = directory / f"{name}-int8"
    assert quantized.exists() == (name in ("deepscaler_16k", "rloo"))
    run = read_run(directory / name)
    assert len(run.series(metric)) == 2
    assert run.series("reward")
    if name == "dapo":
        assert "rewards/soft_overlong_punishment_reward/mean" in rollout
        # An untrained model gets the same reward for every answer: the rounds end, and training
        # continues.
        assert rollout["dynamic_sampling/rounds"] > 1
        assert rollout["dynamic_sampling/filled_share"] == 0
    if name == "rloo":
        assert rollout["mismatch/kl_k3"] > 0
        assert "kl" in rollout, "beta is above 0, and there is a reference model"


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    """A module of reward functions in the working directory, which has a name of its own for each
    test.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"rewards_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "def level_reward(completions, level, **kwargs):\n    return level\n"
    )
    return name


def test_reward_functions_by_name_and_by_path(my_rewards):
    named = "accuracy_reward think_format_reward get_soft_overlong_punishment"
    names = f"{my_rewards}.level_reward {named} trl.rewards.accuracy_reward"
    mine, ours, think, overlong, theirs = load_rewards(names.split())
    assert mine([], level=[2]) == [2]
    assert ours is grading.accuracy_reward
    assert theirs is not ours
    assert think.__name__ == "think_format_reward"
    assert overlong(completion_ids=[[0] * 1024, [0] * 1280]) == [0.0, -1.0], "as with TRL's command"
    Path("unfinished_rewards.py").write_text("def length(:")
    wrong_names = "acuracy_reward no_such_module.length unfinished_rewards.length"
    for wrong in (*wrong_names.split(), f"{my_rewards}.__name__"):
        with pytest.raises(ValueError, match=rf"--reward_funcs {wrong} .* give the .*path"):
            load_rewards([wrong])


@pytest.fixture
def trained(model, tmp_path, monkeypatch):
    """Run a command, whose trainer does not train; how the trainer was built."""
    monkeypatch.setattr(questions, "learn", lambda *arguments: None)

    def trained(command, rows, argv, parameters=0):
        built = MagicMock()
        counted = [SimpleNamespace(numel=lambda: parameters)]
        built.return_value.model.parameters.return_value = counted
        monkeypatch.setattr(trl_qurl, f"QuRL{command.upper()}Trainer", built)
        (tmp_path / "q.jsonl").write_text(rows)
        given = f"--model {model} --dataset {tmp_path}/q.jsonl --output_dir {tmp_path} {argv}"
        questions.train(command, *parsed(command, given))
        return built.call_args.kwargs

    return trained


@pytest.mark.parametrize("command", ["grpo", "ppo", "rloo"])
@pytest.mark.parametrize("is_graded", [False, True])
def test_reward_functions_reach_the_trainer(command, is_graded, my_rewards, trained, caplog):
    names = ["level_reward", *["accuracy_reward"] * is_graded]
    row = '{"question": "1 + 1?", "level": 2, "answer": "2"}\n'
    given = trained(command, row, f"--reward_funcs {my_rewards}.{' '.join(names)}")
    assert [function.__name__ for function in given["reward_funcs"]] == names
    [row] = given["train_dataset"]
    assert (row["level"], row["answer"]) == (2, "2")
    assert row.get("solution") == ("$2$" if is_graded else None)
    assert ("1 answers are compared as mathematics, 0 as text" in caplog.text) == is_graded
    assert row["prompt"][0]["content"].endswith("boxed{}.") == is_graded
    assert ("value_model" in given) == (command == "ppo")


def refused(argv):
    """The error of a command that may not start an engine."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        questions.train("grpo", *parsed("grpo", f"--model /no/engine/may/start {argv}"))
    return str(caught.value)


def test_saving_in_8_bits_needs_a_format(tmp_path):
    error = refused(f"--output_dir {tmp_path} --save_quantized --rollout_quantization none")
    assert "save_quantized" in error
    assert "rollout_quantization is None" in error


@pytest.fixture
def checkpoints(tmp_path):
    """Three checkpoints, the last one incomplete, and a directory without any."""
    (tmp_path / "empty").mkdir()
    for step in (8, 16, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (8, 16):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    return tmp_path


def test_a_wrong_checkpoint_is_refused_before_a_model_is_looked_for(checkpoints):
    empty = checkpoints / "empty"
    for directory, wrong in ((checkpoints, checkpoints / "checkpoint-100"), (empty, "true")):
        error = refused(f"--output_dir {directory} --resume_from_checkpoint {wrong}")
        assert "resume_from_checkpoint" in error
        assert str(directory) in error
    assert questions.checkpoint_to_resume("false", str(checkpoints)) is None
    first = checkpoints / "checkpoint-8"
    assert questions.checkpoint_to_resume(str(first), str(checkpoints)) == first


def test_control_c_names_the_latest_checkpoint(checkpoints):
    latest = f"from {checkpoints}/checkpoint-16, add --resume_from_checkpoint true"
    for directory, way in ((checkpoints, latest), (checkpoints / "empty", "no checkpoint yet")):
        trainer = MagicMock()
        trainer.args.output_dir = str(directory)
        trainer.train.side_effect = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt, match=way):
            questions.learn(trainer, None)


def test_a_fault_in_a_reward_function_has_a_place():
    def reward(completions):
        return json.loads("{")

    line = reward.__code__.co_firstlineno + 1
    trainer = MagicMock(reward_funcs=[reward, MagicMock()])
    trainer.train = lambda resume_from_checkpoint: reward([])
    place = rf"failed in {__file__}, line {line}: JSONDecodeError\('Expecting"
    with pytest.raises(ValueError, match=place):
        questions.learn(trainer, None)


@pytest.mark.parametrize(("steps", "is_long"), [(20, False), (2000, True), (-1, True)])
def test_a_long_run_on_a_cpu_is_announced(steps, is_long, trained, caplog):
    rows = 2000 * '{"question": "1 + 1?", "answer": "2"}\n'
    trained("grpo", rows, f"--max_steps {steps}", parameters=135_000_000)
    assert ("would take about" in caplog.text) == is_long
    logging.getLogger("trl").warning("[RANK 0] a line of one process")
    assert "a line of one process" in caplog.text
    assert "RANK" not in caplog.text


DATASETS = """\
=> openai/gsm8k: gsm8k
--dataset openai/gsm8k => openai/gsm8k: gsm8k
--dataset=mine.jsonl => mine.jsonl:
--dataset mine.jsonl --eval-tasks held_out.jsonl => mine.jsonl: held_out.jsonl
--config mine.yaml => mine.jsonl:"""


@pytest.mark.parametrize("case", DATASETS.splitlines())
def test_another_dataset_drops_the_tasks_of_a_recipe(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.yaml", dataset="mine.jsonl")
    argv, expected = case.split("=> ")
    script, _, _ = parsed("grpo", f"--config lora_w4 {argv}")
    assert [f"{script.dataset}:", *script.eval_tasks] == expected.split()


CONVERTED = r"""
rollout_quantization: off => rollout_quantization is False: write 'none'
objective: off => objective is False, but must be one of 'acr', 'tis'
quantization_ignore: => quantization_ignore is None, .*, or \[\] for none
quantization_ignore: [1] => quantization_ignore has the pattern 1
1: 2 => Unknown .*setting .*: 1"""


@pytest.mark.parametrize("case", CONVERTED.split("\n")[1:])
def test_values_that_yaml_converts_are_refused(case, tmp_path):
    text, named = case.split(" => ")
    path = tmp_path / "mine.yaml"
    path.write_text(f"{text}\n")
    with pytest.raises(ValueError, match=named):
        parsed("grpo", f"--config {path}")
