"""The tasks and tables of the real model's study; training itself is `trl-qurl demo --model` with other settings."""

import gzip
import json

import pytest

from benchmarks.chat_tasks import TASKS, facts_reward
from benchmarks.objectives.summary import read_arms
from benchmarks.real_model_tables import arm_table, contrast_table

LONG = "one two three four five six seven eight nine ten eleven twelve"


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_held_out_questions_are_not_trained_on(task):
    learned, held_out = ({messages[-1]["content"] for messages, _ in part} for part in (task.learned, task.held_out))
    assert len(held_out) == len(task.held_out) and len(learned) == len(task.learned)
    assert not learned & held_out


@pytest.mark.parametrize(
    ("lines", "reward"),
    [
        ([f"{number}. {LONG}" for number in range(1, 6)], 1.0),
        ([f"{number}. {LONG}" for number in (1, 3, 2)], 0.2),  # only the first is in its place
        ([f"1. {LONG}", "2. too short"], 0.2),
        ([f"{number}. {LONG}" for number in range(1, 7)], 0.0),  # six
        (["none"], 0.0),
    ],
)
def test_facts_count_in_their_places(lines, reward):
    assert facts_reward("\n".join(lines)) == pytest.approx(reward)


def test_the_tables_compare_runs_of_one_seed(tmp_path):
    times = {"time/generate_s": 1.0, "time/sync_s": 0.5, "time/logps_s": 0.5, "time/update_s": 2.0}
    row = {"mismatch/kl_k3": 0.02, "mismatch/ratio_max": 3.0, "mismatch/capped_share": 0.01, "mismatch/ess": 0.9}
    for arm, seed, accuracy in (("bf16", 0, 0.9), ("bf16", 1, 0.8), ("int8_acr", 1, 0.7)):
        settings = {"seed": seed, "full_precision": accuracy, "engine": accuracy}
        lines = [{"settings": settings}, *({"step": 4 * i, "reward": 0.5} | row | times for i in range(1, 13))]
        content = "\n".join(map(json.dumps, lines)).encode()
        (tmp_path / f"{arm}-seed{seed}.jsonl.gz").write_bytes(gzip.compress(content))
    arms = read_arms(tmp_path, ["bf16", "int8_acr"])
    assert "| int8_acr | 1 | 0.500 | 0.500 | 0.700 | 0.700 | 0.0200 |" in arm_table(arms)
    assert arm_table(arms).endswith("| 10.0 |")  # seconds: 1 + 0.5 + 0.5 + 4 x 2
    assert "| int8_acr − bf16 | 1 | 0.000 | 0.000 | -0.100 | -0.100 |" in contrast_table(arms)  # seed 1 alone
