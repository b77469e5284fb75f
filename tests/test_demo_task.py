"""The demo without an engine: task, accuracy, the cached warm start, and what it says."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trl_qurl.lab.curves import final_value
from trl_qurl.lab.demo import evaluate, outcome, task, warm_start
from trl_qurl.lab.runs import Run

TINY = warm_start.WarmStartSettings(target=0.0, max_updates=2, evaluate_every=1, batch_size=4)


@pytest.fixture(scope="module")
def tokenizer():
    return task.build_tokenizer()


def test_tokenizer_round_trip_through_disk(tokenizer, tmp_path):
    from transformers import AutoTokenizer, Qwen2Config

    Qwen2Config(vocab_size=task.VOCABULARY_SIZE).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # as TRL and vLLM load it, beside a model's config
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded("123+456=9750<end>")["input_ids"]
    # digits from 2, plus 12, equals 13, end 1
    assert ids == [3, 4, 5, 12, 6, 7, 8, 13, 11, 9, 7, 2, 1]
    assert loaded.decode(ids, skip_special_tokens=True) == "123+456=9750"
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)


def test_splits_share_no_problem_in_either_order():
    assert task.Problem(123, 456).answer == "9750"  # 579, padded 0579, units first
    assert task.sample_problems(20, seed=3) == task.sample_problems(20, seed=3)
    training = set(task.sample_problems(5000, seed=1))
    held_out = set(task.sample_problems(1000, seed=1, held_out=True))
    assert not held_out & training
    assert not {task.Problem(problem.right, problem.left) for problem in held_out} & training
    share = sum(task.Problem(left, 500).held_out for left in range(100, 1000)) / 900
    assert 0.5 / task.HELD_OUT_ONE_IN < share < 2 / task.HELD_OUT_ONE_IN


def test_dataset_and_reward(tokenizer):
    dataset = task.build_dataset([task.Problem(123, 456)], tokenizer)
    assert dataset[0] == {"prompt": "123+456=", "answer_ids": [11, 9, 7, 2, 1]}
    right = dataset[0]["answer_ids"]
    completions = [right, right[:4], [*right[:4], 0], [11, 9, 0, 7, 2], [11, 9, 7, 3, 1]]
    rewards = task.exact_match(completion_ids=completions, answer_ids=[right] * 5, prompts=None)
    assert rewards == [1.0] + [0.0] * 4


def test_teacher_forcing_agrees_with_sampling_token_by_token(tokenizer):
    policy = warm_start.build_model(tokenizer, seed=0).train()
    ids = task.encode_problems(task.sample_problems(3, seed=0), tokenizer)
    slow = 0.0
    with torch.no_grad():
        for row in ids:
            logp = 0.0
            for position in range(task.PROMPT_TOKENS, len(row)):
                logits = policy(input_ids=row[None, :position]).logits[0, -1]
                logp += logits.log_softmax(-1)[row[position]].item()
            slow += math.exp(logp) / len(ids)
    assert evaluate.measure_policy(policy, ids).expected == pytest.approx(slow, rel=1e-4)
    assert policy.training  # the trainer's logging depends on the mode
    # Two problems with two answer tokens of a vocabulary of three; the right tokens are (0, 1) and
    # (2, 0).
    right = [[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]  # 0.5 * 0.8 = 0.4, and both are most likely
    wrong = [[0.1, 0.3, 0.6], [0.25, 0.5, 0.25]]  # 0.6 * 0.25 = 0.15, and the second is not
    accuracy = evaluate.score_answers(
        torch.tensor([right, wrong]).log() + 7.0, torch.tensor([[0, 1], [2, 0]])
    )
    assert (accuracy.expected, accuracy.greedy) == (pytest.approx((0.4 + 0.15) / 2, abs=1e-6), 0.5)


def test_warm_start_is_cached_and_not_trained_again(tmp_path, monkeypatch, capsys):
    place = warm_start.cached_warm_start(TINY, tmp_path)
    # a target of 0 is reached at the first evaluation
    assert "\nWarm start, update 1: accuracy 0." in capsys.readouterr().out
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in place.iterdir()
    }
    monkeypatch.setattr(warm_start, "train_warm_start", None)
    assert warm_start.cached_warm_start(TINY, tmp_path) == place
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [place.parent.name]
    assert warm_start.fingerprint(TINY) != warm_start.fingerprint(replace(TINY, seed=1))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="max_updates=2, below target=0.9"):
        warm_start.cached_warm_start(replace(TINY, target=0.9), tmp_path)


def run_of(accuracies, kl=0.0005, algorithm="GRPO", scheme="int8"):
    """A run with an update per rollout, and these accuracies."""
    settings = {"algorithm": algorithm, "rollout_quantization": scheme}
    rows = [
        {"step": step, outcome.ACCURACY: accuracy, outcome.KL: kl}
        for step, accuracy in enumerate(accuracies, 1)
    ]
    return Run(Path(), settings, rows)


def test_what_it_says(monkeypatch):
    stored = run_of([0.5, 0.6, 0.9], scheme=None)
    monkeypatch.setattr(outcome, "read_run", {outcome.STORED: stored}.get)
    # Of short runs, the last half counts.
    accuracy, mismatch, cost = outcome.sentences(run_of([0.5, 0.75]), 0.4)
    assert "40.0% before and 75.0% after" in accuracy
    assert "0.0005 nats" in mismatch and "no objective made a difference" in mismatch
    assert "16-bit run solved 60.0%. INT8 ended 15.0 points above" in cost  # of the first two
    _, mismatch, cost = outcome.sentences(run_of([0.5, 0.55, 0.85], kl=0.001, scheme="fp8"), 0.4)
    assert "growth is a warning" in mismatch and "no objective" not in mismatch
    assert "16-bit run solved 75.0%. FP8 ended 5.0 points below" in cost
    assert "no 16-bit run of PPO" in outcome.sentences(run_of([0.5], algorithm="PPO"), 0.4)[2]
    assert outcome.find_shortfall(run_of([0.6]), 0.47, 0.2) is None
    shortfall = outcome.find_shortfall(run_of([0.6]), 0.47, 0.4)
    assert "from 0.470 to 0.600" in shortfall and "25%" in shortfall and "40%" in shortfall


def test_it_shows_the_answers_that_changed():
    pytest.importorskip("rich")
    problems = [task.Problem(100, 100 + n) for n in range(5)]
    before = ["200", "9", "202", "9", "9"]
    after = ["200", "201", "9", "8", "204"]
    said, table = outcome.changed_answers(outcome.Outcome(None, 0.0, problems, before, after), 3)
    assert [[*column.cells] for column in table.columns] == [
        ["100 + 101", "100 + 102", "100 + 103"],
        ["201", "202", "203"],
        ["9", "202", "9"],
        ["201", "9", "8"],
    ]
    assert said.startswith("4 of the actor's 5 greedy answers changed: 2 became right, 1 wrong")


def test_the_picture_has_the_stored_runs(monkeypatch):
    drawn = []
    monkeypatch.setattr(outcome, "draw", lambda panels, path: drawn.append(panels))
    for algorithm in ("GRPO", "PPO"):
        outcome.draw_outcome(run_of([0.5], algorithm=algorithm), Path())
    (accuracy, kl), (alone, _) = drawn
    exact, ours, wrong = accuracy.lines
    assert [final_value(*accuracy.lines[label]) > 0.7 for label in (exact, wrong)] == [True, False]
    assert ours.startswith("INT8") and [*alone.lines] == [ours]
    assert kl.logarithmic
