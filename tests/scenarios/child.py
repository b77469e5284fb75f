"""The frame of a scenario: the tests' modules on the path, arguments, and a record on the standard
output.
"""

import json
import logging
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1]))


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, level=logging.NOTSET):
        super().__init__(level)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def print_record(record):
    """Print what the fixture `run_scenario` returns, in the main process."""
    if os.environ.get("RANK", "0") == "0":
        print("RECORD " + json.dumps(record, default=str), flush=True)


def run_all(run):
    """Run once for each list of arguments, separated by `--and`, and print the records."""
    lists = [[]]
    for argument in sys.argv[1:]:
        if argument == "--and":
            lists.append([])
        else:
            lists[-1].append(argument)
    print_record([run(arguments) for arguments in lists])
