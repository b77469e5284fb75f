"""The command line: fast help, and mistakes answered in one line."""

import dataclasses
import re
import sys
from unittest.mock import MagicMock

import pytest
from conftest import completed
from documents import ROOT
from tiny import save_tiny
from trl import ModelConfig

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig, cli
from trl_qurl.cli import COMMANDS
from trl_qurl.cli.options import check_model
from trl_qurl.config.rollout import QuantizedRolloutsConfig
from trl_qurl.lab import device
from trl_qurl.lab.data import load_questions
from trl_qurl.lab.recipes.arguments import CriticArguments, check_names, parse

HEAVY = ("torch", "transformers", "trl", "vllm", "datasets", "matplotlib", "rich")
TRAINING = ("grpo", "ppo", "rloo")


def test_help_names_the_commands(capsys):
    assert cli.main([]) == 0, "without arguments the commands are listed"
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert f"    {name} " in out


def test_a_command_imports_its_own_module_and_nothing_heavy():
    """Except torch, for the dtypes of the formats. Commands of the core do not import the lab."""
    core = []
    lab = []
    for name in sorted(COMMANDS.keys() - {*TRAINING}):
        if ".lab." in COMMANDS[name].module:
            lab.append(name)
        else:
            core.append(name)
    code = "import sys; from trl_qurl import cli\n"
    code += "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += f"assert not {{*{HEAVY}}} & sys.modules.keys()\n"
    for name in [*core, *lab]:
        code += f"try: cli.main([{name!r}, '--help'])\nexcept SystemExit: pass\n"
        if name in core:
            code += "assert not [module for module in sys.modules if '.lab' in module]\n"
    code += f"assert not {{*{HEAVY[1:]}}} & sys.modules.keys()\n"
    printed = completed(sys.executable, "-c", code).stdout
    assert re.findall(r"^usage: trl-qurl (\w+) ", printed, re.MULTILINE) == [*core, *lab]
    code = "import sys; from trl_qurl import cli\nassert cli.main(['grpo', '--modle', 'm']) == 2\n"
    completed(sys.executable, "-c", f"{code}assert not {{*{HEAVY}}} & sys.modules.keys()")


@pytest.mark.parametrize(
    "config", [QuRLGRPOConfig, QuRLPPOConfig, QuRLRLOOConfig, ModelConfig, CriticArguments]
)
def test_names_that_are_checked_before_imports_are_those_of_the_configurations(config):
    check_names([setting.name for setting in dataclasses.fields(config)], ["--no_bf16", "-1"])


MISTYPED = """\
gpro => invalid choice: 'gpro' (choose from
quantize model out --scheme in8 => 'in8'; did you mean 'int8'?
quantize model out more --scheme int8 => quantize: error: unrecognized arguments: more
quantize model out --scheme none => --scheme is 'none'
eval model => required: --tasks
grpo --modle m => modle, did you mean model?
grpo --model m q.jsonl => Unknown option or setting (--help-all lists them): q.jsonl
grpo --learning-rte=1e-6 => learning_rte, did you mean learning_rate?
grpo --warmup_ratio .1 --no_cuda => a share of all steps); no_cuda (transformers < 5.0)
grpo --config old.yaml => max_prompt_length (TRL < 0.28): filter long prompts out
grpo --weight_sync steam => choose from 'auto', 'stream'
grpo --scheme int8 => scheme (other commands of trl-qurl): `rollout_quantization`
grpo --config gsm9k => settings file gsm9k does not exist
ppo --config cut.yaml => in "cut.yaml", line 3
ppo --config list.yaml => list.yaml has no settings: write"""


@pytest.mark.parametrize("mistake", MISTYPED.splitlines())
def test_a_typing_error_is_named_in_the_last_line(mistake, capsys, monkeypatch, tmp_path):
    arguments, named = mistake.split(" => ")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "old.yaml").write_text("max_prompt_length: 256\nlearning_rate: 1.0e-6\n")
    (tmp_path / "cut.yaml").write_text("seed: 1\na: [1\n b: 2")
    (tmp_path / "list.yaml").write_text("- learning_rate")
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(arguments.split())
    except SystemExit as exit:  # argparse's
        status = exit.code
    assert status == 2
    error = capsys.readouterr().err
    assert named in error.splitlines()[-1]
    assert "--adam_beta1" not in error, "argparse would print the options of TRL"


def test_options_are_read_as_they_are_meant(monkeypatch):
    run = MagicMock(return_value=0)
    for module in ("lab.quantize", "cli.serve"):
        monkeypatch.setattr(f"trl_qurl.{module}.run", run)

    def read(command):
        assert cli.main(command.split()) == 0
        [args] = run.call_args.args
        assert args.model == "MODEL"
        return args

    assert read("quantize --ignore lm_head --scheme int8 MODEL OUT").ignore == ["lm_head"]
    two = read("serve --ignore a --ignore re:.*down_proj MODEL")
    assert two.ignore == ["a", "re:.*down_proj"]
    further = "--max-model-len 64 --ignore-patterns *.bin --quantization=fp8"
    served = read(f"serve MODEL {further}")
    assert served.ignore == ["lm_head"]
    assert served.extra_args == further.split()


def test_control_c_is_one_line(tmp_path):
    """Also while a library is imported, here one that presses the keys itself."""
    (tmp_path / "transformers.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
    )
    (tmp_path / "config.json").write_text("{}")
    options = f"-m trl_qurl quantize {tmp_path} {tmp_path}/out --scheme int8"
    command = [sys.executable, *options.split()]
    done = completed(*command, status=130, seconds=120, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stderr == "\ntrl-qurl: interrupted\n"  # after the terminal's ^C


@pytest.mark.parametrize("error", [ValueError, ImportError, OSError, TypeError])
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


@pytest.mark.parametrize("command", TRAINING)
def test_the_help_of_training_shows_essential_options(capsys, command):
    with pytest.raises(SystemExit):
        cli.main([command, "--config", "tis", "--help"])
    shown = capsys.readouterr().out
    listed = re.findall(r"^  --(\w+) ", shown, re.MULTILINE)
    fields = {field.name for field in dataclasses.fields(QuantizedRolloutsConfig)} - {"use_vllm"}
    assert {*fields, "dataset", "output_dir", "vllm_mode", "config", "objective"} < {*listed}
    assert listed[0] == "model"
    assert len(listed) < 65
    assert f"trl-qurl {command} --model " in shown, "an example"
    words = " ".join(shown.split())
    assert "default: None" not in words, "which says nothing"
    assert "so actor and policy have the same weights. (default: False)" in words  # one sentence
    with pytest.raises(SystemExit):
        cli.main([command, "--help-all"])
    assert "--adam_beta1" in capsys.readouterr().out


def test_without_an_accelerator_training_is_put_on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    for name, bf16 in (("avx2", False), ("amx_bf16", True), ("avx512_bf16", True)):
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda name=name: {name: True})
        assert device.cpu_settings() == {"use_cpu": True, "bf16": bf16}
    command = ["--output_dir", str(tmp_path)]
    _, training, _ = parse("grpo", command)
    assert training.use_cpu
    assert training.bf16
    _, training, _ = parse("grpo", [*command, "--bf16", "false"])  # what the user says goes first
    assert training.use_cpu
    assert not training.bf16
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert device.cpu_settings() == {}


def test_a_name_on_the_hub_costs_one_request(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "huggingface_hub.HfApi.repo_info", lambda api, name, **given: asked.append((name, given))
    )
    check_model("Qwen/Qwen2.5-0.5B-Instruct")
    assert asked == [("Qwen/Qwen2.5-0.5B-Instruct", {"repo_type": "model", "timeout": 10})]
    # any error of a connection
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *args, **given: 1 / 0)
    with pytest.raises(ConnectionError, match=r"^some/set .*dataset, .* \(division by zero\)"):
        load_questions("some/set", "train")
    (tmp_path / "models--Qwen--Qwen2.5-0.5B-Instruct").mkdir()  # downloaded before
    check_model("Qwen/Qwen2.5-0.5B-Instruct")


def test_offline_a_misspelled_directory_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert cli.main(f"quantize modell {tmp_path}/out --scheme int8".split()) == 2
    assert "modell is not a local model" in capsys.readouterr().err
    (tmp_path / "models--some--model" / "snapshots").mkdir(parents=True)  # of any revision
    check_model("some/model")


def test_what_is_quantized_is_not_quantized_again(tmp_path, monkeypatch, capsys):
    save_tiny(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "llmcompressor", None)  # nor is it needed
    for source, target, status in (("model", "once", 0), ("once", "twice", 2)):
        command = f"quantize {tmp_path}/{source} {tmp_path}/{target} --scheme fp8"
        assert cli.main(command.split()) == status
    assert "once is quantized already" in capsys.readouterr().err
    assert not (tmp_path / "twice").exists()


def test_a_directory_without_a_model_is_not_taken_for_a_hub_name(tmp_path, monkeypatch, capsys):
    for path in ("a/missing/path", str(tmp_path)):
        with pytest.raises(FileNotFoundError, match=f"{path} .*config.json"):
            check_model(path)
    (tmp_path / "config.json").write_text("{}")
    check_model(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(f"quantize ~/ {tmp_path}/out --scheme int8".split()) == 2
    error = capsys.readouterr().err
    assert "~/ does not contain a model" in error
    assert "~ is not expanded" in error
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")
    with pytest.raises(FileNotFoundError, match="adapter.*merge_and_unload.*--save_quantized"):
        check_model(str(tmp_path))
