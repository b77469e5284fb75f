"""Every command that the documentation shows exists as it is shown: program, file, target, subcommand, option, extra.

`trl-qurl` lines, and those of scripts that train, go through the real parsers. `settings.yaml` and other files of the
reader's own are made up; what is not ours (ssh, ray, git, cd, jupyter) is only known by name.
"""

import argparse
import configparser
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from accelerate.commands.launch import launch_command_parser
from documents import PAGES, ROOT, inline_code, shell_commands

from trl_qurl.cli import COMMANDS, build_parser
from trl_qurl.lab.recipes import grpo, ppo, rloo

RECIPES = {"grpo": grpo, "ppo": ppo, "rloo": rloo}
FILES_OF_READERS = ("settings.yaml", "mismatch.yaml")
ON_CPU = ["--use_cpu", "--bf16", "false", "--report_to", "none"]
NOT_OURS = {"cd", "conda", "export", "git", "hf", "jupyter", "ray", "source", "tensorboard", "trackio", "vllm"}

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))


def extras() -> set[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return set(setup["options.extras_require"])


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Every subcommand's own parser; those of the recipes have no options."""
    parsers = {}
    for name in COMMANDS:
        [action] = [
            action for action in build_parser([name])._actions if isinstance(action, argparse._SubParsersAction)
        ]
        parsers[name] = action.choices[name]
    return parsers


def check(words: list[str]) -> None:
    """A command as a shell would start it.

    Raises:
        AssertionError: something in it does not exist.
    """
    program, *rest = words
    if re.fullmatch(r"[A-Z_]+=\S*", program):  # a variable for one command
        return check(rest)
    checks = {
        "accelerate": check_accelerate,
        "docker": check_docker,
        "make": check_make,
        "pip": check_pip,
        "python": check_python,
        "sbatch": check_sbatch,
        "trl-qurl": check_trl_qurl,
        "uv": lambda words: check_pip(words[1:]) if words[0] == "pip" else None,
        "ssh": lambda words: check(words[1:]),
    }
    assert program in checks or program in NOT_OURS, f"nothing is known of {program}"
    if program in checks:
        checks[program](rest)


def check_make(words: list[str]) -> None:
    for word in words:
        name, equals, _ = word.partition("=")
        assert name in (VARIABLES if equals else TARGETS), f"make has no {name}"


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    for word in words[1:]:
        word = word.strip("'\"")  # quoted for a shell that expands brackets
        if found := re.match(r"(?:trl-qurl|\.)\[([\w,]+)\]", word):
            assert set(found[1].split(",")) <= extras(), word
        elif "/" in word and not word.startswith(("git+", "~")):
            assert (ROOT / word).exists(), word


def check_sbatch(words: list[str]) -> None:
    """`sbatch [options] examples/slurm.sh [options of the training]`."""
    [script] = [i for i, word in enumerate(words) if word.endswith(".sh")]
    assert (ROOT / words[script]).exists() and all(word.startswith("--") for word in words[:script])
    check_training(grpo, words[script + 1 :])


def check_docker(words: list[str]) -> None:
    """`docker build`, of a file that is there; `docker run`, whose arguments after the image go to `trl-qurl`."""
    if words[0] == "build":
        name = words[words.index("--file") + 1] if "--file" in words else "Dockerfile"
        assert (ROOT / name).exists() and words[-1] == ".", words
    else:
        [image] = [i for i, word in enumerate(words) if re.fullmatch(r"trl-qurl(-cpu)?", word)]
        check_trl_qurl(words[image + 1 :])


def check_accelerate(words: list[str]) -> None:
    """`accelerate launch [options] SCRIPT|-m MODULE ...`, through accelerate's own parser."""
    assert words[0] == "launch"
    args = launch_command_parser().parse_args(words[1:])
    assert args.config_file is None or file_of(args.config_file).suffix == ".yaml"
    check_python([*(["-m"] if args.module else []), args.training_script, *args.training_script_args])


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if words[1] == "trl_qurl":
            return check_trl_qurl(words[2:])
        assert importlib.util.find_spec(words[1]), words[1]
        script = ROOT / (words[1].replace(".", "/") + ".py")
    else:
        script = file_of(words[0])
        words = words[:1] + words
    for kind, recipe in RECIPES.items():
        if script.name == f"gsm8k_{kind}.py":
            return check_training(recipe, words[2:])
    for option in (word for word in words[2:] if word.startswith("--")):
        assert f'"{option}"' in "".join(path.read_text() for path in neighbors(script)), f"{script.name} {option}"


def neighbors(script: Path) -> list[Path]:
    """A script, and what it takes its options from."""
    return sorted(script.parent.glob("*.py"))


def check_trl_qurl(words: list[str]) -> None:
    if words[0] in RECIPES:
        return check_training(RECIPES[words[0]], words[1:])
    args, further = build_parser(words).parse_known_args(words)
    assert args.command == "serve" or not further, further
    if args.command == "report":
        for run in map(str, args.runs):
            assert "/" not in run or list(ROOT.glob(run)), run
    if args.command == "serve" and further:  # for vLLM
        vllm = pytest.importorskip("vllm.engine.arg_utils", reason="options of vLLM's server need vLLM")
        fields = {field.replace("_", "-") for field in vllm.AsyncEngineArgs.__dataclass_fields__}
        assert {word[2:] for word in further if word.startswith("--")} <= fields


def check_training(recipe: ModuleType, words: list[str]) -> None:
    """Through TRL's parser, with the reader's own files made up."""
    words = [word for word in words if word not in ("--help", "--help-all")]
    made_up = {grpo: "dapo.yaml", ppo: "gsm8k_ppo.yaml", rloo: "variants/tis.yaml"}[recipe]
    given = [str(ROOT / "examples/recipes" / made_up) if word in FILES_OF_READERS else word for word in words]
    given = [str(ROOT / word) if word.startswith("examples/") else word for word in given]
    recipe.parse_arguments([*given, *ON_CPU])


def file_of(name: str) -> Path:
    """A file by its path in the repository, or by its name where the reader has copied it."""
    found = [ROOT / name] if (ROOT / name).exists() else list((ROOT / "examples").rglob(name))
    assert len(found) == 1, f"there is no {name}"
    return found[0]


SHOWN = shell_commands()


def test_commands_were_found():
    assert len(SHOWN) > 60 and {words[0] for _, words in SHOWN} >= {"make", "pip", "python", "trl-qurl", "ssh"}


@pytest.mark.parametrize(("place", "words"), SHOWN, ids=[f"{place} {' '.join(words[:3])}" for place, words in SHOWN])
def test_a_command_exists_as_it_is_shown(place, words):
    try:
        check(words)
    except SystemExit as refused:  # argparse
        pytest.fail(f"{place}: {' '.join(words)} is refused: {refused}")


def test_a_server_and_a_trainer_on_one_machine_have_gpus_of_their_own():
    """Each command says which, in CUDA_VISIBLE_DEVICES, and no GPU is in both."""
    found: dict[str, dict[str, set[str]]] = {}
    for place, words in SHOWN:
        variable, rest = ("", words) if words[0] in ("ssh", "trl-qurl", "accelerate") else (words[0], words[1:])
        is_server = rest[:2] == ["trl-qurl", "serve"] and not {"--host", "--distributed-executor-backend"} & set(rest)
        if is_server or any(re.match(r"http://(127\.|localhost)", word) for word in rest):
            name, _, devices = variable.partition("=")
            assert name == "CUDA_VISIBLE_DEVICES" and devices, f"{place}: {' '.join(words)}"
            found.setdefault(place, {})["server" if is_server else "trainer"] = set(devices.split(","))
    pairs = [ends for ends in found.values() if len(ends) == 2]
    assert len(pairs) >= 2 and not any(ends["server"] & ends["trainer"] for ends in pairs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_exist(page):
    known = subcommands()
    for code in inline_code(page):
        program, *words = code.split()
        if program == "make" and words:
            check_make([word.strip("'\"") for word in words if "..." not in word and word[:1] not in "\"'"][:1])
        if program == "pip" and words[:1] == ["install"]:
            check_pip(words)
        if program != "trl-qurl" or not words or words[0].startswith("-"):
            continue
        for name in words[0].split("|"):
            assert name in known, code
            if name not in RECIPES:
                options = {option for action in known[name]._actions for option in action.option_strings}
                assert {word for word in words if word.startswith("--")} <= options, code


def test_every_subcommand_is_on_its_page():
    shown = {code.split()[1] for code in inline_code(ROOT / "docs/reference.md") if code.startswith("trl-qurl ")}
    assert subcommands().keys() <= shown


def test_every_extra_and_target_is_told_of():
    text = "".join(page.read_text() for page in PAGES)
    for target in TARGETS - {"help", "setup", "lock", "clean"}:
        assert re.search(rf"make (\S+ )?{target}\b", text), f"make {target}"
    for extra in extras() - {"docs", "test", "dev", "plots", "demo"}:
        assert re.search(rf"trl-qurl\[[\w,]*\b{extra}\b|`{extra}`", text), extra
