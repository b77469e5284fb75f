"""Recipes: they parse, repeat the paper's settings (ours fit in
memory), and run on real questions.
"""

import io
import itertools
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import pytest
import yaml
from tiny import ENGINE, SHARED, save_tiny, tiny_model

import trl_qurl
from trl_qurl.lab import grading
from trl_qurl.lab.recipes import grpo, ppo, rloo
from trl_qurl.lab.recipes.arguments import merge_settings, recipes, take_files
from trl_qurl.lab.recipes.questions import (
    Recipe,
    _set_up_logging,
    checkpoint_to_resume,
    tell_other_format,
)
from trl_qurl.lab.recipes.rewards import load_rewards, punishments
from trl_qurl.lab.runs import read_run
from trl_qurl.trainers.run_log import begin_log, end_log

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
OWN = sorted((ROOT / "trl_qurl" / "lab" / "recipes" / "own").glob("*.yaml"))
VARIANTS = sorted((ROOT / "examples" / "recipes" / "variants").glob("*.yaml"))
ON_CPU = ["--use_cpu", "--bf16", "false"]

# What the paper says: processes the file is written for, completions and prompts a rollout,
# rollouts, longest completion, learning rate, KL coefficient, temperature.
PAPER = {
    "gsm8k_ppo": (1, 256, 256, 435, 512, 1e-5, 0.0, 1.0),
    "dapo": (8, 512 * 16, 512, 200, 3072, 1e-6, 0.0, 1.0),
    "deepscaler_8k": (8, 256 * 8, 256, 800, 8192, 1e-6, 1e-3, 0.6),
    "deepscaler_16k": (8, 256 * 16, 256, 400, 16384, 1e-6, 1e-3, 0.6),
    "deepscaler_24k": (8, 256 * 16, 256, 400, 24576, 1e-6, 1e-3, 0.6),
}
# Format, objective, UAQ's s; `None` for what the recipe says.
VARIANT_SETTINGS = {
    "bf16": (None, "naive", 1.0),
    "naive": ("int8", "naive", 1.0),
    "tis": ("int8", "tis", 1.0),
    "qurl": ("int8", "acr", 1.5),
    "qurl_without_uaq": ("int8", "acr", 1.0),
}
GSM8K = ("gsm8k/train", "gsm8k/test")
DATA = {
    "gsm8k_ppo": GSM8K,
    "lora_w4": GSM8K,
    "rloo": GSM8K,
    "dapo": ("dapo_math_17k/train", "aime2024/test"),
}
DEEPSCALER = ("deepscaler/train_subset", "aime2024/test")


def module_of(recipe):
    return ppo if recipe.stem.endswith("ppo") else grpo


def test_recipes_and_variants_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tis").mkdir()  # a directory of that name is not a settings file
    _, config, model = ppo.parse_arguments(["--config", "gsm8k_ppo", "tis", *ON_CPU])
    assert (model.model_name_or_path, config.objective) == ("Qwen/Qwen2.5-0.5B-Instruct", "tis")
    mine = write(tmp_path / "mine.yaml", seed=7)
    _, config, _ = ppo.parse_arguments(["--config", "gsm8k_ppo", mine, *ON_CPU])
    assert (config.max_steps, config.seed) == (1740, 7)
    assert [*recipes()] == [path.stem for path in (*RECIPES, *VARIANTS, *OWN)]
    assert [{path.stem for path in paths} for paths in (RECIPES, VARIANTS)] == [
        {*PAPER},
        {*VARIANT_SETTINGS},
    ]
    with pytest.raises(
        FileNotFoundError, match="file gsm8k does not exist: .* or variant: dapo, .*, bf16, .*tis"
    ):
        ppo.parse_arguments(["--config", "gsm8k", *ON_CPU])
    write(tmp_path / "dapo", seed=7)
    assert take_files(["--config", "dapo"]) == ([("dapo", {"seed": 7})], []), (
        "a local file comes first"
    )
    settings = [[("a", {"seed": 1, "beta": 2}), ("b", {"beta": 3})][::step] for step in (1, -1)]
    merged = [merge_settings(files, {"seed", "beta"}, "grpo") for files in settings]
    assert merged == [{"seed": 1, "beta": 3}, {"seed": 1, "beta": 2}], (
        "later files override earlier ones"
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_the_settings_of_the_paper(recipe):
    script, config, model = module_of(recipe).parse_arguments(["--config", str(recipe), *ON_CPU])
    processes, completions, prompts, rollouts, longest, rate, beta, temperature = PAPER[recipe.stem]
    made = config.per_device_train_batch_size * config.steps_per_generation * processes
    assert (made, made // config.num_generations) == (completions, prompts)
    assert config.max_steps == rollouts * config.updates_per_rollout
    assert config.updates_per_rollout > 1, "no clip bound could act"
    assert (config.max_completion_length, config.learning_rate) == (longest, rate)
    assert (config.beta, config.temperature) == (beta, temperature)
    assert config.objective == "acr" and config.rollout_quantization == "int8"
    assert config.uaq_scale == (1.0 if recipe.stem == "gsm8k_ppo" else 1.5)
    # A row of the log for each rollout, and a benchmark after a whole number of them.
    assert config.logging_steps == config.updates_per_rollout
    assert script.eval_tasks and script.eval_tasks_steps % config.updates_per_rollout == 0
    before = {"deepscaler_16k": "deepscaler_8k", "deepscaler_24k": "deepscaler_16k"}.get(
        recipe.stem
    )
    if before:
        assert (
            model.model_name_or_path
            == grpo.parse_arguments(["--config", before, *ON_CPU])[1].output_dir
        )


def test_dapo_is_dapo():
    (recipe,) = (path for path in RECIPES if path.stem == "dapo")
    script, config, _ = grpo.parse_arguments(["--config", str(recipe), *ON_CPU])
    assert (config.epsilon, config.epsilon_high, config.loss_type) == (0.2, 0.28, "dapo")
    assert config.dynamic_sampling and config.dynamic_sampling_reward == "accuracy_reward"
    assert config.mask_truncated_completions
    (punish,) = punishments(script.soft_overlong_cache, config)
    # DAPO, Eq. 13, with 3072 tokens and 614 of them before the limit: -(2765 - 2458) / 614 = -0.5.
    assert punish(completion_ids=[[0] * 2458, [0] * 2765, [0] * 3072]) == pytest.approx(
        [0.0, -0.5, -1.0]
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_variant_of_every_recipe_loads(recipe, variant):
    _, config, _ = module_of(recipe).parse_arguments(
        ["--config", str(recipe), str(variant), *ON_CPU]
    )
    scheme, objective, uaq_scale = VARIANT_SETTINGS[variant.stem]
    assert (config.rollout_quantization, config.objective, config.uaq_scale) == (
        scheme,
        objective,
        uaq_scale,
    )
    _, plain, _ = module_of(recipe).parse_arguments(["--config", str(recipe), *ON_CPU])
    assert (config.max_steps, config.learning_rate) == (plain.max_steps, plain.learning_rate)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with a tokenizer, saved."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    sizes = {"max_position_embeddings": 4096, "tie_word_embeddings": False}
    return save_tiny(tmp_path_factory.mktemp("model"), template, **sizes)


def two_steps_of(name, model, directory):
    """Arguments for two steps of a tiny model on the real questions."""
    train, test = (SHARED / "data" / f"{data}.jsonl.gz" for data in DATA.get(name, DEEPSCALER))
    argv = [*ON_CPU, "--model_name_or_path", model, "--max_steps", 2]
    argv += [
        "--dataset",
        train,
        "--dataset_limit",
        12,
        "--question_column",
        "question",
        "--answer_column",
        "answer",
    ]
    argv += ["--eval_tasks", f"held_out={test}", "--eval_tasks_limit", 3, "--eval_tasks_steps", 2]
    argv += ["--output_dir", directory / name, "--logging_steps", 1, "--save_strategy", "no"]
    argv += [
        "--per_device_train_batch_size",
        4,
        "--gradient_accumulation_steps",
        1,
        "--steps_per_generation",
        2,
    ]
    argv += ["--max_completion_length", 6, "--report_to", "none", "--vllm_max_model_length", 4096]
    return [*argv, "--vllm_engine_kwargs", json.dumps(ENGINE), "--sync_check_interval", 0]


def run_of(recipe, variants, model, directory):
    """The arguments with which the scenario runs a recipe."""
    argv = ["--config", recipe, *variants, *two_steps_of(recipe.stem, model, directory)]
    if module_of(recipe) is grpo:
        argv += ["--num_generations", 4]
    if recipe.stem == "dapo":
        argv += ["--soft_overlong_cache", 3]
    if recipe.stem in ("deepscaler_16k", "lora_w4"):
        argv += ["--save_quantized"]
    command = module_of(recipe).__name__.rpartition(".")[2]
    return [command, recipe.stem, json.dumps([str(argument) for argument in argv])]


@pytest.fixture(scope="module")
def two_steps(run_scenario, model, tmp_path_factory):
    """Every recipe of the paper for two steps, each with another variant; what was logged."""
    directory = tmp_path_factory.mktemp("runs")
    runs = [
        run_of(recipe, [v], model, directory)
        for recipe, v in zip(RECIPES, itertools.cycle(VARIANTS))
    ]
    # RLOO has no recipe of the paper's, and runs with its command's defaults.
    argv = [*two_steps_of("rloo", model, directory), "--num_generations", 4, "--save_quantized"]
    runs.append(["rloo", "rloo", json.dumps([str(argument) for argument in argv])])
    return directory, run_scenario("recipes.py", *itertools.chain(*runs))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "data").exists(), reason="the data sets are not beside this checkout"
)
def test_an_adapter_on_a_base_in_four_bits_trains(run_scenario, model, tmp_path):
    (recipe,) = OWN
    record = run_scenario("recipes.py", *run_of(recipe, [], model, tmp_path))[recipe.stem]
    updates = [row for row in record["history"] if "loss" in row]
    assert len(updates) == 2 and all(row["loss"] == row["loss"] for row in updates)
    assert (tmp_path / "lora_w4" / "adapter_model.safetensors").exists()
    assert (tmp_path / "lora_w4-w4a16" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.vllm
@pytest.mark.xdist_group("recipes")
@pytest.mark.skipif(
    not (SHARED / "data").exists(), reason="the data sets are not beside this checkout"
)
@pytest.mark.parametrize("recipe", [*RECIPES, Path("rloo")], ids=lambda path: path.stem)
def test_two_steps_on_the_real_questions(recipe, two_steps):
    directory, records = two_steps
    record = records[recipe.stem]
    assert record["step"] == 2
    updates = [row for row in record["history"] if "loss" in row]
    assert len(updates) == 2 and all(row["loss"] == row["loss"] for row in updates)
    [rollout] = [row for row in record["history"] if "reward" in row]
    assert rollout["num_tokens"] > 100 and "rewards/accuracy_reward/mean" in rollout
    metric = "eval_held_out/actor_avg@1"
    evaluations = [row for row in record["history"] if metric in row]
    assert [row["step"] for row in evaluations] == [0, 2], (
        "a benchmark before the first step and after the second"
    )
    assert (directory / recipe.stem / "config.json").exists()
    quantized = directory / f"{recipe.stem}-int8"
    assert quantized.exists() == (recipe.stem in ("deepscaler_16k", "rloo"))
    run = read_run(directory / recipe.stem)
    assert len(run.series(metric)) == 2 and run.series("reward")
    if recipe.stem == "dapo":
        assert "rewards/soft_overlong_punishment_reward/mean" in rollout
        # An untrained model gets the same reward for every answer: the rounds end, and training
        # continues.
        assert (
            rollout["dynamic_sampling/rounds"] > 1 and rollout["dynamic_sampling/filled_share"] == 0
        )
    if recipe.stem == "rloo":
        assert rollout["mismatch/kl_k3"] > 0 and "kl" in rollout, (
            "beta is above 0, and there is a reference model"
        )


def write(path, **settings):
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def test_a_length_penalty_for_every_length_is_refused(tmp_path):
    _, config, _ = grpo.parse_arguments(
        ["--output_dir", str(tmp_path), "--max_completion_length", "100", *ON_CPU]
    )
    assert punishments(None, config) == []
    for cache in (0, 100, 200):
        with pytest.raises(
            ValueError, match=f"soft_overlong_cache={cache} .* max_completion_length=100"
        ):
            punishments(cache, config)


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
    mine = load_rewards([f"{my_rewards}.level_reward", f"{my_rewards}:level_reward"])
    assert [function([], level=[2]) for function in mine] == [[2], [2]]
    names = [
        "accuracy_reward",
        "think_format_reward",
        "get_soft_overlong_punishment",
        "trl.rewards.accuracy_reward",
    ]
    ours, think, overlong, theirs = load_rewards(names)
    assert (
        ours is grading.accuracy_reward
        and theirs is not ours
        and think.__name__ == "think_format_reward"
    )
    assert overlong(completion_ids=[[0] * 1024, [0] * 1280]) == [0.0, -1.0], "as with TRL's command"
    for wrong in (
        "acuracy_reward",
        "no_such_module.length",
        f"{my_rewards}.level",
        f"{my_rewards}.__name__",
    ):
        with pytest.raises(
            ValueError,
            match=rf"--reward_funcs {wrong} cannot be loaded .* import path of a function",
        ):
            load_rewards([wrong])


@pytest.mark.parametrize("recipe", [grpo, ppo, rloo], ids=["grpo", "ppo", "rloo"])
@pytest.mark.parametrize("is_graded", [False, True])
def test_reward_functions_reach_the_trainer(
    recipe, is_graded, my_rewards, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        trl_qurl, f"QuRL{recipe.__name__.rpartition('.')[2].upper()}Trainer", built := MagicMock()
    )
    monkeypatch.setattr(Recipe, "_learn", lambda *arguments: None)
    (tmp_path / "few.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "q.jsonl").write_text('{"question": "1 + 1?", "level": 2, "answer": "2"}\n')
    names = [f"{my_rewards}.level_reward", *["accuracy_reward"] * is_graded]
    argv = [
        "--model",
        model,
        "--dataset",
        tmp_path / "q.jsonl",
        "--reward_funcs",
        *names,
        "--output_dir",
        tmp_path,
    ]
    trainer = recipe.train(*recipe.parse_arguments([*ON_CPU, *map(str, argv)]))
    with pytest.raises(
        ValueError,
        match=r"'level_reward' \(missing .* 'level'\): it passes .* question, answer.* by name",
    ):
        recipe.train(
            *recipe.parse_arguments(
                [*ON_CPU, *map(str, argv), "--dataset", str(tmp_path / "few.jsonl")]
            )
        )
    given = built.call_args.kwargs
    assert [function.__name__ for function in given["reward_funcs"]] == [
        name.split(".")[-1] for name in names
    ]
    [row] = given["train_dataset"]
    assert (row["level"], row["answer"], row.get("solution")) == (
        2,
        "2",
        "$2$" if is_graded else None,
    )
    assert row["prompt"][0]["content"].endswith("boxed{}.") == is_graded
    assert ("eval" if is_graded else "report") in str(
        trainer.accelerator.print.call_args
    ).partition("Next: ")[2]


def test_saving_in_8_bits_needs_a_format(tmp_path):
    arguments = [
        *ON_CPU,
        "--output_dir",
        tmp_path,
        "--save_quantized",
        "--rollout_quantization",
        "none",
    ]
    with pytest.raises(
        ValueError, match="rollout_quantization is None: set it to a format, or run"
    ):
        grpo.train(*grpo.parse_arguments(list(map(str, arguments))))


def resume(tmp_path, *value):
    """Run `trl-qurl grpo` with this value of `--resume_from_checkpoint`."""
    argv = [
        *ON_CPU,
        "--model",
        "/no/engine/may/start",
        "--output_dir",
        tmp_path,
        "--resume_from_checkpoint",
        *value,
    ]
    grpo.train(*grpo.parse_arguments(list(map(str, argv))))


@pytest.fixture
def checkpoints(tmp_path):
    """Three checkpoints. The last one is incomplete."""
    for step in (8, 16, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (8, 16):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    return tmp_path


def test_a_wrong_checkpoint_is_refused_before_a_model_is_loaded(checkpoints, tmp_path_factory):
    listed = (
        f"Complete checkpoints in {checkpoints}: {checkpoints}/checkpoint-8, "
        f"{checkpoints}/checkpoint-16."
    )
    for wrong in ("checkpoint-16", checkpoints / "checkpoint-100", checkpoints / "checkpoint-12"):
        with pytest.raises(FileNotFoundError, match=re.escape(listed)) as caught:
            resume(checkpoints, wrong)
        assert f"resume_from_checkpoint={wrong}: no complete checkpoint" in str(caught.value)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(
        FileNotFoundError, match="=true: no complete checkpoint.*To start over, remove the option"
    ):
        resume(empty, "true")
    with pytest.raises(FileNotFoundError, match="Complete checkpoints in .*: none"):
        resume(empty, "checkpoint-8")


class Stopped(SimpleNamespace):
    """A trainer whose user presses Ctrl-C, after transformers has looked for an output head in the
    checkpoint.
    """

    shown: ClassVar[list] = []
    state = SimpleNamespace(global_step=0)

    def train(self, resume_from_checkpoint):
        [function(self) for function in vars(self).get("reward_funcs", ())]
        log = logging.getLogger("transformers.trainer")
        log.addHandler(handler := logging.Handler())
        handler.emit = lambda record: self.shown.append(record.getMessage())
        log.warning("There were missing keys in the checkpoint model loaded: ['lm_head.weight'].")
        log.removeHandler(handler)
        raise KeyboardInterrupt

    def is_world_process_zero(self):
        return False


def test_control_c_names_the_latest_checkpoint(checkpoints, tmp_path_factory):
    for tied in (False, True):  # only a tied head is expected to be missing
        args = SimpleNamespace(output_dir=str(checkpoints))
        stopped = Stopped(model=tiny_model(tie_word_embeddings=tied), args=args)
        with pytest.raises(
            KeyboardInterrupt,
            match=f"from {checkpoints}/checkpoint-16, add --resume_from_checkpoint",
        ):
            grpo.RECIPE._learn(stopped, None)
        assert len(stopped.shown) == 1
    stopped.args.output_dir = str(tmp_path_factory.mktemp("empty"))
    with pytest.raises(KeyboardInterrupt, match="no checkpoint yet"):
        grpo.RECIPE._learn(stopped, None)


def test_a_fault_in_a_reward_function_has_a_place():
    def reward(completions):
        return json.loads("{")

    line = reward.__code__.co_firstlineno + 1
    stopped = Stopped(model=tiny_model(), args=None, reward_funcs=[reward, tiny_model()])
    with pytest.raises(
        ValueError, match=rf"failed in {__file__}, line {line}: JSONDecodeError\('Expecting"
    ):
        grpo.RECIPE._learn(stopped, None)


@pytest.mark.parametrize(("processes", "said"), [(1, "Ready."), (2, "[RANK 0] Ready.")])
def test_one_process_has_no_rank(processes, said, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [handler := logging.StreamHandler(io.StringIO())])
    _set_up_logging(SimpleNamespace(world_size=processes, process_index=0, use_cpu=False))
    logging.getLogger("trl_qurl.rollout").info("[RANK 0] Ready.")
    assert handler.stream.getvalue() == f"{said}\n"


def test_the_latest_complete_checkpoint_is_what_true_means(checkpoints):
    for latest in (True, "true"):
        assert checkpoint_to_resume(latest, str(checkpoints)) == str(checkpoints / "checkpoint-16")
    given = str(checkpoints / "checkpoint-8")
    assert checkpoint_to_resume(given, str(checkpoints)) == given
    for no in (None, False, "false"):
        assert checkpoint_to_resume(no, str(checkpoints)) is None


@pytest.mark.parametrize(
    ("argv", "tasks"),
    [
        ([], ["gsm8k"]),
        (["--dataset", "openai/gsm8k"], ["gsm8k"]),
        (["--dataset", "mine.jsonl"], []),
        (["--dataset=mine.jsonl"], []),
        (["--dataset", "mine.jsonl", "--eval-tasks", "held_out.jsonl"], ["held_out.jsonl"]),
        (["--eval_tasks", "held_out.jsonl", "--dataset", "mine.jsonl"], ["held_out.jsonl"]),
    ],
)
def test_another_dataset_drops_the_tasks_of_a_recipe(argv, tasks, tmp_path, caplog):
    script, _, _ = grpo.parse_arguments(["--config", "lora_w4", *argv, *ON_CPU])
    assert script.eval_tasks == tasks
    # others' about a process group
    ours = [record for record in caplog.records if record.name.startswith("trl_qurl")]
    assert (ours == []) == bool(tasks)
    mine = write(tmp_path / "mine.yaml", dataset="mine.jsonl")
    script, _, _ = grpo.parse_arguments(["--config", "lora_w4", mine, *ON_CPU])
    assert script.eval_tasks == [] and script.dataset == "mine.jsonl"


@pytest.mark.parametrize(("before", "told"), [("int8", False), (None, True), ({"*": "int8"}, True)])
def test_a_run_that_resumes_in_another_format_says_so(before, told, tmp_path, caplog):
    begin_log(tmp_path / "run.jsonl", {"rollout_quantization": before})
    end_log(tmp_path / "run.jsonl")
    tell_other_format(tmp_path / "run.jsonl", "int8")
    expected = [f"Resuming with rollout_quantization=int8; it was {before or 'none'}."]
    assert [record.message for record in caplog.records] == expected * told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rollout_quantization: off",
            "rollout_quantization is False: write 'none', one of int8, fp8",
        ),
        ("objective: off", "objective is False, but must be one of 'acr', 'tis'"),
        ("rollout_quantization: 8", "rollout_quantization is 8: write 'none', one of int8"),
        (
            "quantization_ignore:",
            r"quantization_ignore is None, but must be a list of patterns, or \[\] for none",
        ),
        ("quantization_ignore: [1]", "quantization_ignore has the pattern 1, which is not text"),
        (
            "env: [A]",
            r"env in .*mine.yaml is \['A'\]: write a line `NAME: value` below it for each variable",
        ),
    ],
)
def test_values_that_yaml_converts_are_refused(text, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"{text}\n")
    with pytest.raises(ValueError, match=message):
        grpo.parse_arguments(["--config", str(tmp_path / "mine.yaml"), *ON_CPU])
    (tmp_path / "mine.yaml").write_text("mismatch_guard: off\nenv:\n")
    _, config, _ = grpo.parse_arguments(["--config", str(tmp_path / "mine.yaml"), *ON_CPU])
    assert config.mismatch_guard == "off"
