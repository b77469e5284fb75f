"""The command as a user meets it: help that comes at once, and mistakes answered in one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import child_environment

from trl_qurl import __version__, cli
from trl_qurl.lab.recipes import ppo
from trl_qurl.lab.recipes.arguments import check_model, take_settings
from trl_qurl.lab.recipes.grpo import parse_arguments

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "trl", "vllm", "datasets", "matplotlib", "rich")


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "trl_qurl", *arguments],
        capture_output=True,
        text=True,
        env=child_environment(**environment),
        timeout=120,
        check=False,
    )


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"trl-qurl {__version__}")


def test_help_names_the_commands_and_loads_nothing_heavy():
    code = "import sys; from trl_qurl import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += f"assert not [name for name in {HEAVY} if name in sys.modules]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("grpo", "quantize", "serve", "demo", "env"):
        assert command in done.stdout


def test_the_shell_may_ask_what_could_come_next(tmp_path):
    """argcomplete, which is optional, is imported only where it asks; here something that stands for it."""
    (tmp_path / "argcomplete.py").write_text("def autocomplete(parser): raise SystemExit(f'asked {parser.prog}')\n")
    asked = run("--version", PYTHONPATH=str(tmp_path), _ARGCOMPLETE="1")
    assert asked.stderr.strip() == "asked trl-qurl"
    assert run("--version", PYTHONPATH=str(tmp_path)).stdout.startswith("trl-qurl")


@pytest.mark.parametrize(
    "arguments", [("quantize", "model", "out", "--scheme", "int3"), ("demo", "--sheme", "int8"), ("train",), ()]
)
def test_arguments_that_do_not_exist(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "trl-qurl" in done.stderr and "error:" in done.stderr


def test_a_missing_data_set_is_one_line_without_a_traceback():
    arguments = ("grpo", "--dataset", "missing.jsonl", "--use_cpu", "true", "--report_to", "none")
    done = run(*arguments)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("trl-qurl: error:")]
    assert errors == [line for line in errors if "missing.jsonl does not exist" in line] and len(errors) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, ImportError, OSError, ConnectionError])
def test_user_errors_become_one_line(monkeypatch, capsys, error):
    def fail(args):
        raise error("first line\n  second line")

    monkeypatch.setattr("trl_qurl.lab.demo.command.run", fail)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "trl-qurl: error: first line second line\n"


def test_debug_shows_the_traceback(monkeypatch):
    def fail(args):
        raise ValueError("deep")

    monkeypatch.setattr("trl_qurl.lab.demo.command.run", fail)
    monkeypatch.setenv("TRL_QURL_DEBUG", "1")
    with pytest.raises(ValueError, match="deep"):
        cli.main(["demo"])


def test_faults_of_our_own_are_not_hidden(monkeypatch):
    def fail(args):
        raise TypeError("a bug")

    monkeypatch.setattr("trl_qurl.lab.demo.command.run", fail)
    with pytest.raises(TypeError):
        cli.main(["demo"])


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_everything_after_a_recipe_goes_to_trl(monkeypatch, recipe):
    seen = []
    monkeypatch.setattr(cli, f"run_{recipe}", lambda args: seen.append(args.further) or 0)
    cli.main([recipe, "--config", "run.yaml", "--learning_rate", "1e-6", "--help"])
    assert seen == [["--config", "run.yaml", "--learning_rate", "1e-6", "--help"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n b: 2", "is not valid YAML"),
        ("- learning_rate", "holds no `name: value` lines"),
        ("learning_rte: 1.0e-6", "sets learning_rte, which no setting is called; `trl-qurl ppo --help` lists"),
        (None, "does not exist"),
    ],
)
def test_settings_files_that_cannot_be_used(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        take_settings(["--config", str(path)], known_names={"learning_rate"}, command="ppo")
    assert str(path) in str(caught.value)


def test_settings_files_that_can(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 1.0e-6\nenv:\n  NAME: value\n")
    take_settings(["--seed", "1", "--config", str(path)], known_names={"learning_rate"}, command="ppo")
    take_settings(["--seed", "1"], known_names=(), command="ppo")
    with pytest.raises(ValueError, match="needs the name"):
        take_settings(["--config"], known_names=(), command="ppo")


def test_a_directory_without_a_model_is_not_taken_for_a_hub_name(tmp_path):
    check_model("Qwen/Qwen2.5-0.5B-Instruct")
    with pytest.raises(FileNotFoundError, match="There is no model in"):
        check_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))


def test_an_adapter_is_not_taken_for_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"holds an adapter.*merge_and_unload.*--save_quantized"):
        check_model(str(tmp_path))


def test_command_line_overrides_file_overrides_recipe(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 3.0e-6\nlora_r: 8\n")
    arguments = ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path)]
    script, training, model = parse_arguments([*arguments, "--lora_r", "4", "--config", str(path)])
    assert script.dataset == "openai/gsm8k"
    assert (training.learning_rate, training.uaq_scale, model.lora_r) == (3e-6, 1.0, 4)
    updates_per_rollout = training.steps_per_generation // training.gradient_accumulation_steps
    assert updates_per_rollout == 4


def test_the_ppo_recipe_is_the_papers_run(tmp_path):
    arguments = ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path), "--value_model", "other"]
    script, training, model = ppo.parse_arguments(arguments)
    assert (model.model_name_or_path, script.value_model) == ("Qwen/Qwen2.5-0.5B-Instruct", "other")
    assert (training.generation_batch_size, training.num_generations, training.max_completion_length) == (256, 1, 512)
    updates_per_rollout = training.steps_per_generation // training.gradient_accumulation_steps
    assert training.max_steps == 435 * updates_per_rollout
    assert (training.learning_rate, training.critic_learning_rate, training.uaq_scale) == (1e-5, 1e-5, 1.0)


def test_quantize_passes_its_arguments_on(monkeypatch, tmp_path, capsys):
    import transformers

    from trl_qurl import quantization

    calls = []
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, dtype: f"model of {name}")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: f"tokenizer of {name}")
    monkeypatch.setattr(
        quantization, "write_checkpoint", lambda *args, **kwargs: calls.append((args, kwargs)), raising=False
    )
    out = tmp_path / "out"
    arguments = ["--scheme", "fp8", "--ignore", "lm_head", "re:.*down_proj"]
    assert cli.main(["quantize", "some/model", str(out), *arguments]) == 0
    expected = ("model of some/model", "tokenizer of some/model", "fp8", out)
    named = {"ignore": ("lm_head", "re:.*down_proj"), "quantizer": "llmcompressor", "show_progress": True}
    assert calls == [(expected, named)]
    assert str(out) in capsys.readouterr().out


def test_options_that_do_not_exist_are_answered_with_what_was_meant():
    with pytest.raises(
        ValueError, match=r"There is no option --learning_rte; did you mean --learning_rate\? `trl-qurl"
    ):
        parse_arguments(["--use_cpu", "--bf16", "false", "--learning_rte", "1e-6"])
    with pytest.raises(ValueError, match="There is no option --qqq. `trl-qurl grpo --help` lists all"):
        parse_arguments(["--use_cpu", "--bf16", "false", "--qqq=3"])


def test_a_mistake_is_not_answered_with_three_hundred_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["grpo", "--max_steps", "many"])
    assert capsys.readouterr().err.splitlines() == [
        "usage: trl-qurl grpo [--config FILE ...] [--OPTION VALUE ...]",
        "trl-qurl grpo: error: argument --max_steps/--max-steps: invalid int value: 'many'",
    ]


def test_templates_for_issues_are_forms():
    """The fields that the host of a repository wants of a form; ids must differ."""
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 4
    for path in forms:
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            assert form == {"blank_issues_enabled": True}
            continue
        assert form.keys() == {"name", "description", "labels", "body"}
        questions = [part for part in form["body"] if part["type"] == "textarea"]
        assert len({part["id"] for part in questions}) == len(questions) >= 3
        assert all(part["attributes"]["label"] for part in questions)
        assert any(part.get("validations", {}).get("required") for part in questions)
        for name in re.findall(r"docs/\w+\.md", path.read_text()):
            assert (ROOT / name).is_file(), name
