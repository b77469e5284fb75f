"""Every command in the documentation exists as shown (`support.commands`)."""

import re
import shlex

import pytest
from documents import PAGES, ROOT, inline_code, shell_commands
from support.commands import STAND_INS, check, check_make

from trl_qurl.cli import COMMANDS, build_parser

SHOWN = shell_commands()
IDS = [f"{place} {' '.join(words[:3])}" for place, words in SHOWN]


@pytest.mark.parametrize(("place", "words"), SHOWN, ids=IDS)
def test_a_command_exists_as_shown(place, words):
    try:
        check(words)
    except SystemExit as error:  # argparse
        pytest.fail(f"{place}: the parser refuses {' '.join(words)}: {error}")


def test_a_server_and_a_trainer_on_one_machine_use_different_gpus():
    local = "trl-qurl serve (?!.*(--host|--distributed))|http://(127|localhost)"
    devices = []
    for place, words in SHOWN:
        if re.search(local, " ".join(words)):
            used = words[0].removeprefix("CUDA_VISIBLE_DEVICES=").split(",")
            for device in used:
                assert device.isdigit(), place
                devices.append((place, device))
    assert len(devices) >= 4
    assert len(devices) == len({*devices}), devices


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_exist(page):
    for code in inline_code(page):
        program, *words = code.split()
        if program == "make":
            check_make(shlex.split(code)[1:])
        if program == "trl-qurl" and words and not words[0].startswith("-"):
            for command in words[0].split("|"):
                assert command in COMMANDS, code
                if command in STAND_INS:
                    continue
                [subparsers] = build_parser([command])._subparsers._group_actions
                options = subparsers.choices[command]._option_string_actions
                shown = {word for word in words if word.startswith("--")}
                assert shown <= options.keys(), code
