"""The command line: fast help, and mistakes answered in one line."""

import dataclasses
import re
import runpy
import subprocess
import sys

import pytest
from conftest import child_environment
from documents import ROOT
from tiny import save_tiny
from trl import GRPOConfig, RLOOConfig

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig, cli
from trl_qurl.cli import COMMANDS
from trl_qurl.cli.options import check_model
from trl_qurl.lab import device
from trl_qurl.lab.data import load_questions
from trl_qurl.lab.recipes import rloo
from trl_qurl.lab.recipes.arguments import merge_settings, take_files
from trl_qurl.lab.recipes.grpo import parse_arguments

HEAVY = ("torch", "transformers", "trl", "vllm", "datasets", "matplotlib", "rich")


def run(*arguments, python=sys.executable, **environment):
    return subprocess.run(
        [python, "-m", "trl_qurl", *arguments],
        capture_output=True,
        text=True,
        env=child_environment(**environment),
        timeout=120,
        check=False,
    )


def test_help_names_the_commands_and_imports_nothing_heavy(capsys):
    assert cli.main([]) == 0, "without arguments the commands are listed"
    out = capsys.readouterr().out
    assert all(f"    {name} " in out for name in COMMANDS)
    code = (
        "import sys; from trl_qurl import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    )
    code += f"assert not [name for name in {HEAVY} if name in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("grpo", "quantize", "serve", "demo", "doctor"):
        assert command in done.stdout


def test_a_command_imports_its_own_module_and_nothing_heavy():
    """Except torch, for the dtypes of the formats. Commands of the core do not import the lab."""
    names = sorted(
        COMMANDS.keys() - {"grpo", "ppo", "rloo"}, key=lambda name: ".lab." in COMMANDS[name].module
    )
    code = "import sys; from trl_qurl import cli\n"
    for name in names:
        code += f"try: cli.main([{name!r}, '--help'])\nexcept SystemExit: pass\n"
        if ".lab." not in COMMANDS[name].module:
            code += "assert not [module for module in sys.modules if '.lab' in module]\n"
    code += f"assert not [module for module in {HEAVY[1:]} if module in sys.modules]\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^usage: trl-qurl (\w+) ", done.stdout, re.MULTILINE) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpro"], "argument COMMAND: invalid choice: 'gpro' (choose from"),
        (["demo", "--sheme", "int8"], "Unexpected argument --sheme int8; did you mean --scheme?"),
        (
            ["bench", "model", "--schemes", "int8"],
            "Unexpected argument --schemes int8; did you mean --scheme?",
        ),
        (
            ["quantize", "model", "out", "--scheme", "in8"],
            "Unknown quantization scheme 'in8'; did you mean 'int8'? ",
        ),
        (["quantize", "model", "out", "more", "--scheme", "int8"], "Unexpected argument more."),
        (
            ["quantize", "model", "out", "--scheme", "none"],
            "--scheme is 'none', which quantizes nothing: choose one of int8",
        ),
    ],
)
def test_a_typing_error_is_named_in_the_last_line(capsys, arguments, message):
    try:
        status = cli.main(arguments)
    except SystemExit as exit:  # argparse's
        status = exit.code
    assert status == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("trl-qurl") and message in last


@pytest.mark.parametrize("script", ["gsm8k_grpo.py", "gsm8k_ppo.py"])
def test_a_mistyped_option_of_a_script_is_one_line(script, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", [script, "--learning_rte", "1", "--use_cpu", "--bf16", "false"]
    )
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    usage, error = capsys.readouterr().err.splitlines()
    assert (
        usage.startswith("usage: ")
        and error.startswith(f"{script}: error: ")
        and "--learning_rte" in error
    )


def test_both_spellings_of_an_option(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "trl_qurl.lab.evaluation.command.run", lambda args: seen.append(args.max_tokens) or 0
    )
    for option in ("--max-tokens", "--max_tokens"):
        assert cli.main(["eval", "MODEL", "--tasks", "gsm8k", option, "5000"]) == 0
    assert seen == [5000, 5000]


def test_model_and_dataset_are_proposed_for_what_was_typed(capsys):
    assert cli.main(["grpo", "--modle", "m"]) == 2
    assert "Unknown option --modle; did you mean --model?" in capsys.readouterr().err
    assert cli.main(["grpo", "--model", "m", "q.jsonl"]) == 2
    assert "Unexpected argument q.jsonl; did you mean --dataset q.jsonl?" in capsys.readouterr().err


def test_serve_passes_options_to_vllm_but_not_misspelled_ones(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("trl_qurl.cli.serve.run", lambda args: calls.append(args.extra_args) or 0)
    further = [
        "--max-model-len",
        "64",
        "--ignore-patterns",
        "*.bin",
        "--quantization=fp8",
        "--ssl-keyfile",
        "key",
    ]
    assert cli.main(["serve", "model", *further]) == 0
    assert calls == [further]
    monkeypatch.undo()
    assert cli.main(["serve", "model", "--sheme=int4"]) == 2
    assert (
        capsys.readouterr().err
        == "trl-qurl: error: Unknown option --sheme; did you mean --scheme?\n"
    )
    assert cli.main(["serve", "MODEL", "--ignore", "lm_head", "re:.*down_proj"]) == 2
    assert (
        "Unexpected argument re:.*down_proj: pass one MODEL, and one pattern"
        in capsys.readouterr().err
    )


def test_ignore_takes_one_pattern_each_time(monkeypatch):
    seen = []
    for name in ("quantize", "serve"):
        monkeypatch.setattr(f"trl_qurl.cli.{name}.run", lambda args: seen.append(vars(args)) or 0)
    assert cli.main(["quantize", "--ignore", "lm_head", "--scheme", "int8", "MODEL", "OUT"]) == 0
    assert cli.main(["serve", "--ignore", "lm_head", "--ignore", "re:.*down_proj", "MODEL"]) == 0
    assert cli.main(["serve", "--ignore", "a", "MODEL"]) == cli.main(["serve", "MODEL"]) == 0
    assert [found["ignore"] for found in seen] == [
        ["lm_head"],
        ["lm_head", "re:.*down_proj"],
        ["a"],
        ["lm_head"],
    ]
    assert {found["model"] for found in seen} == {"MODEL"} and str(seen[0]["output_dir"]) == "OUT"


def test_control_c_is_one_line(tmp_path):
    """Also while a library is imported, here one that presses the keys itself."""
    (tmp_path / "transformers.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = run(
        "quantize",
        "some/model",
        str(tmp_path / "out"),
        "--scheme",
        "int8",
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    # after the terminal's ^C
    assert (done.returncode, done.stderr) == (130, "\ntrl-qurl: interrupted\n")


@pytest.mark.parametrize(
    "error", [ValueError, FileNotFoundError, ImportError, OSError, ConnectionError, TypeError]
)
def test_user_errors_become_one_line_and_bugs_a_traceback(monkeypatch, capsys, error):
    def fail(args):
        raise error("first line\n  second line")

    monkeypatch.setattr("trl_qurl.lab.demo.command.run", fail)
    if error is not TypeError:
        assert cli.main(["demo"]) == 2
        assert capsys.readouterr().err == "trl-qurl: error: first line second line\n"
        monkeypatch.setenv("TRL_QURL_DEBUG", "1")
    with pytest.raises(error, match="second line"):
        cli.main(["demo"])


@pytest.mark.parametrize(
    ("recipe", "config"),
    [("grpo", QuRLGRPOConfig), ("ppo", QuRLPPOConfig), ("rloo", QuRLRLOOConfig)],
)
def test_the_help_of_a_recipe_shows_essential_options_first(capsys, monkeypatch, recipe, config):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit:
        cli.main([recipe, "--help"])
    assert exit.value.code in (0, None)
    shown = capsys.readouterr().out
    listed = re.findall(r"^  --(\w+) ", shown, re.MULTILINE)
    parent = RLOOConfig if config is QuRLRLOOConfig else GRPOConfig
    assert f"including those of TRL's {parent.__name__} and ModelConfig" in shown
    inherited = {field.name for field in dataclasses.fields(parent)}
    ours = [field.name for field in dataclasses.fields(config) if field.name not in inherited]
    assert set(ours) <= set(listed) and len(listed) == len(set(listed))
    assert max(map(listed.index, ours)) < listed.index("per_device_train_batch_size")
    assert listed[:4] == ["model_name_or_path", "dataset", "output_dir", "max_steps"]
    assert max(map(len, shown.splitlines())) <= 100 and len(shown.splitlines()) < 220
    assert "(default:qurl-gsm8k" in "".join(shown.split()), "a default of the recipe"
    with pytest.raises(SystemExit):
        cli.main([recipe, "--help-all"])
    assert "--adam_beta1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("capabilities", "bf16"),
    [({"avx2": True}, False), ({"avx512_bf16": True}, True), ({"amx_bf16": True}, True)],
)
def test_without_an_accelerator_training_is_put_on_the_cpu(
    monkeypatch, tmp_path, capabilities, bf16
):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    _, training, _ = parse_arguments(["--output_dir", str(tmp_path)])
    assert (training.use_cpu, training.bf16) == (True, bf16)
    _, training, _ = parse_arguments(
        ["--output_dir", str(tmp_path), "--bf16", str(not bf16), "--max_steps", "2000"]
    )
    assert training.bf16 == (not bf16) and training.max_steps == 2000, (
        "what the user says goes first"
    )
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert device.cpu_settings() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\na: [1\n b: 2",
            "is not valid YAML in line 3: expected ',' or ']', but got ':'\\.$",
        ),
        ("seed: 1\0", "is not valid YAML: unacceptable character"),
        ("- learning_rate", "has no `name: value` lines"),
        (
            "learning_rte: 1.0e-6",
            "has unknown settings: learning_rte; did you mean learning_rate\\? `trl-",
        ),
        (None, "does not exist"),
    ],
)
def test_settings_files_that_cannot_be_used(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        files, _ = take_files(["--config", str(path)])
        merge_settings(files, known_names={"learning_rate"}, command="ppo")
    assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="requires the name"):
        take_files(["--config"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--learning_rte", "1e-6"],
            r"Unknown option --learning_rte; did you mean --learning_rate\?",
        ),
        (["--learning-rte=1e-6"], r"Unknown option --learning-rte; did you mean --learning_rate\?"),
        (["--use_cpu", "--bf16", "false", "positional"], "positional"),
        (["--rollout_quantization", "in8"], "; did you mean 'int8'"),
        (["--objective", "tiss"], "; did you mean 'tis'"),
        (["--weight_sync", "steam"], "; did you mean 'stream'"),
        (["--scheme", "int8"], r"Unknown option --scheme; did you mean --rollout_quantization\?"),
        (["--ignore", "lm_head"], r"Unknown option --ignore; did you mean --quantization_ignore\?"),
    ],
)
def test_bad_training_arguments_get_a_suggestion(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_arguments(arguments)


def test_a_bad_value_does_not_print_the_whole_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["grpo", "--max_steps", "many"])
    assert capsys.readouterr().err.splitlines() == [
        "usage: trl-qurl grpo [--config FILE ...] [--OPTION VALUE ...]",
        "trl-qurl grpo: error: argument --max_steps/--max-steps: invalid int value: 'many'",
    ]


def test_a_wrong_settings_file_is_reported_before_slow_imports():
    program = (
        "import sys; from trl_qurl.cli import main; assert main(['grpo', '--config', 'gsm9k']) == "
        "2; assert not {'torch', 'transformers', 'trl'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=child_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0 and "The settings file gsm9k does not exist" in done.stderr, (
        done.stderr
    )


def test_a_name_on_the_hub_costs_one_request(monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.repo_info", lambda api, name, **given: asked.append((name, given))
    )
    check_model("Qwen/Qwen2.5-0.5B-Instruct")
    assert asked == [("Qwen/Qwen2.5-0.5B-Instruct", {"repo_type": "model", "timeout": 10})]
    # any error of a connection
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *args, **given: 1 / 0)
    with pytest.raises(
        ConnectionError,
        match=r"^some/set is not a local dataset, .* \(division by zero\): give a lo",
    ):
        load_questions("some/set", "train")
    # offline by choice; downloaded before
    for setting in ("constants.HF_HUB_OFFLINE", "try_to_load_from_cache"):
        with monkeypatch.context() as patch:
            patch.setattr(
                f"huggingface_hub.{setting}",
                "OFFLINE" in setting or (lambda *a, **k: "config.json"),
            )
            check_model("Qwen/Qwen2.5-0.5B-Instruct")


def test_a_directory_without_a_model_is_not_taken_for_a_hub_name(tmp_path, monkeypatch, capsys):
    for path in ("a/missing/path", str(tmp_path)):
        with pytest.raises(FileNotFoundError, match=f"{path} .*config.json"):
            check_model(path)
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["quantize", "~/", str(tmp_path / "out"), "--scheme", "int8"]) == 2
    error = capsys.readouterr().err
    assert "~/ does not contain a model" in error and "home directory" in error
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")
    with pytest.raises(FileNotFoundError, match="adapter.*merge_and_unload.*--save_quantized"):
        check_model(str(tmp_path))


def test_command_line_overrides_file_overrides_recipe(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: my/model\nlearning_rate: 3.0e-6\nlora_r: 8\nenv:\n  NAME: value\n")
    arguments = ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path)]
    script, training, model = parse_arguments([*arguments, "--lora_r", "4", "--config", str(path)])
    assert script.dataset == "openai/gsm8k"
    assert (training.learning_rate, training.uaq_scale, model.lora_r) == (3e-6, 1.0, 4)
    updates_per_rollout = training.steps_per_generation // training.gradient_accumulation_steps
    assert updates_per_rollout == 4 and model.model_name_or_path == "my/model"
    *_, model = parse_arguments([*arguments, "--model", "other/model"])
    assert model.model_name_or_path == "other/model"


def test_the_rloo_recipe_makes_one_update_per_rollout(tmp_path):
    arguments = ["--use_cpu", "true", "--bf16", "false", "--output_dir", str(tmp_path)]
    _, training, _ = rloo.parse_arguments(arguments)
    assert (
        training.generation_batch_size,
        training.num_generations,
        training.updates_per_rollout,
    ) == (256, 8, 1)
    assert (training.objective, training.learning_rate, training.beta) == ("tis", 1e-5, 0.05)
    _, training, _ = rloo.parse_arguments([*arguments, "--config", "naive"])
    assert training.objective == "naive"
    with pytest.raises(ValueError, match="objective is 'acr', but must be one of 'tis'"):
        rloo.parse_arguments([*arguments, "--config", "qurl"])


def test_quantize_needs_no_llmcompressor(tmp_path, monkeypatch, capsys):
    save_tiny(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "llmcompressor", None)  # as if it were not installed
    command = ["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--scheme", "int8"]
    assert cli.main(command) == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").exists()
