"""Every command in the documentation exists as shown (`support.commands`)."""

import configparser
import re
import shlex

import pytest
from documents import PAGES, ROOT, inline_code, shell_commands
from support.commands import STAND_INS, TARGETS, check, check_make

from trl_qurl.cli import COMMANDS, build_parser

SHOWN = shell_commands()


@pytest.mark.parametrize(
    ("place", "words"), SHOWN, ids=[f"{place} {' '.join(words[:3])}" for place, words in SHOWN]
)
def test_a_command_exists_as_shown(place, words):
    try:
        check(words)
    except SystemExit as error:  # argparse
        pytest.fail(f"{place}: the parser refuses {' '.join(words)}: {error}")


def test_a_server_and_a_trainer_on_one_machine_use_different_gpus():
    devices: dict[str, list[str]] = {}
    for place, words in SHOWN:
        line = " ".join(words)
        is_server = "trl-qurl serve" in line and not re.search("--host|--distributed", line)
        if is_server or re.search(r"http://(127\.|localhost)", line):
            given = re.match(r"CUDA_VISIBLE_DEVICES=(\S+)", line)
            assert given, f"{place}: {line}"
            devices.setdefault(place, []).extend(given[1].split(","))
    assert len(devices) >= 2
    for place, used in devices.items():
        assert len(used) == len(set(used)), f"{place}: {used}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_exist(page):
    for code in inline_code(page):
        program, *words = code.split()
        if program == "make":
            check_make(shlex.split(code)[1:])
        if program == "trl-qurl" and words and not words[0].startswith("-"):
            for command in words[0].split("|"):
                assert command in COMMANDS, code
                [subparsers] = build_parser([command])._subparsers._group_actions
                shown = {word for word in words if word.startswith("--")}
                assert command in STAND_INS or shown <= set(
                    subparsers.choices[command]._option_string_actions
                ), code


def test_every_subcommand_target_and_extra_is_documented():
    text = "".join(page.read_text() for page in PAGES)
    reference = (ROOT / "docs/reference.md").read_text()
    for command in COMMANDS:
        assert f"`trl-qurl {command}`" in reference
    for target in TARGETS - {"help", "setup", "lock", "clean"}:
        assert re.search(rf"make (\S+ )?{target}\b", text), target
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extra in setup["options.extras_require"].keys() - {"docs", "test", "dev", "plots", "demo"}:
        assert re.search(rf"trl-qurl\[[\w,]*\b{extra}\b|`{extra}`", text), extra
