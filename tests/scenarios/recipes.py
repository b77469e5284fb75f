"""Run recipes for two steps each, as `trl-qurl grpo|ppo` would, on a tiny model; prints what each
logged.

Takes triples: the command, the name of the run, and its arguments as a JSON list.
"""

import json
import sys

from child import print_record

from trl_qurl.lab.recipes.arguments import parse
from trl_qurl.lab.recipes.questions import train


def main():
    arguments = sys.argv[1:]
    records = {}
    trainers = []  # as in `tiny.KEPT`
    for command, name, argv in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        trainer = train(command, *parse(command, json.loads(argv)))
        trainers.append(trainer)
        records[name] = {"history": trainer.state.log_history}
    print_record(records)


if __name__ == "__main__":
    main()
