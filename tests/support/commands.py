"""Check a command: its program, files, targets, subcommands and options exist.

`trl-qurl` lines and those of training scripts go through the real parsers, with stand-ins for the
reader's own files. Third-party programs are only known by name.
"""

import importlib.util
import re

import pytest
from accelerate.commands.launch import launch_command_parser
from documents import ROOT
from trl import TrlParser

from trl_qurl import QuRLGRPOConfig, QuRLPPOConfig
from trl_qurl.cli import build_parser
from trl_qurl.lab.recipes.arguments import parse

STAND_INS = {"grpo": "dapo.yaml", "ppo": "gsm8k_ppo.yaml", "rloo": "variants/tis.yaml"}
"""Recipes in place of the reader's own files, by command."""
FILES_OF_READERS = ("settings.yaml", "mismatch.yaml")
ON_CPU = ["--use_cpu", "--bf16", "false", "--report_to", "none"]
THIRD_PARTY = "cd conda docker echo export git hf jupyter pip ray sbatch source ssh uv vllm"

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))


def check(words):
    """Fail if something in a command does not exist."""
    program, *rest = words
    if re.fullmatch(r"[A-Z_]+=\S*", program):  # a variable for one command
        return check(rest)
    checks = {
        "accelerate": check_accelerate,
        "make": check_make,
        "python": check_python,
        "trl-qurl": check_trl_qurl,
    }
    if program in checks:
        checks[program](rest)
    else:
        assert program in THIRD_PARTY.split(), f"{program} is not a known program"


def check_make(words):
    for word in words:
        name, equals, _ = word.partition("=")
        known = VARIABLES if equals else TARGETS
        assert name in known, f"make has no {name}"


def check_accelerate(words):
    """`accelerate launch [options] SCRIPT|-m MODULE ...`, through accelerate's own parser."""
    assert words[0] == "launch"
    args = launch_command_parser().parse_args(words[1:])
    if args.config_file:
        assert file_of(args.config_file).suffix == ".yaml"
    command = [args.training_script, *args.training_script_args]
    if args.module:
        command.insert(0, "-m")
    check_python(command)


def check_python(words):
    name, *options = words
    if name == "-m":
        module, *options = options
        if module == "trl_qurl":
            return check_trl_qurl(options)
        assert importlib.util.find_spec(module), module
        script = ROOT / (module.replace(".", "/") + ".py")
    elif name == "first_run.py":  # which docs/tutorial.md has the reader save
        return None
    else:
        script = file_of(name)
    for kind, config in {"grpo": QuRLGRPOConfig, "ppo": QuRLPPOConfig}.items():
        if script.name == f"gsm8k_{kind}.py":
            TrlParser(config).parse_args_and_config([*options, "--output_dir", "policy", *ON_CPU])
            return None
    # with the modules it imports
    sources = "".join(path.read_text() for path in script.parent.glob("*.py"))
    for option in options:
        if option.startswith("--"):
            assert f'"{option}"' in sources, f"{script.name} {option}"


def check_trl_qurl(words):
    command, *options = words
    if command in STAND_INS:
        return check_training(command, options)
    args, extra = build_parser(words).parse_known_args(words)
    if extra:  # for vLLM
        assert args.command == "serve", extra
        vllm = pytest.importorskip(
            "vllm.engine.arg_utils", reason="options of vLLM's server need vLLM"
        )
        fields = {field.replace("_", "-") for field in vllm.AsyncEngineArgs.__dataclass_fields__}
        assert {word[2:] for word in extra if word.startswith("--")} <= fields


def check_training(command, words):
    """Run TRL's parser."""
    arguments = []
    for word in words:
        if word in FILES_OF_READERS:
            word = f"examples/recipes/{STAND_INS[command]}"
        if word.startswith("examples/"):
            word = str(ROOT / word)
        if word not in ("--help", "--help-all"):
            arguments.append(word)
    parse(command, [*arguments, *ON_CPU])


def file_of(name):
    """Find a file by its path in the repository, or an example by its name."""
    path = ROOT / name
    if path.exists():
        return path
    matches = list((ROOT / "examples").rglob(name))
    assert len(matches) == 1, f"{name} does not exist"
    return matches[0]
