"""The demo without an engine: task, tokenizer, accuracy and the cached warm start."""

import math
import re
from dataclasses import replace

import pytest
import torch

from trl_qurl.lab.demo import evaluate, task, warm_start
from trl_qurl.lab.demo.run import Measurement, find_shortfall

TINY = warm_start.WarmStartSettings(target=0.0, max_updates=2, evaluate_every=1, batch_size=4)


@pytest.fixture(scope="module")
def tokenizer():
    return task.build_tokenizer()


def test_tokenizer_round_trip_through_disk(tokenizer, tmp_path):
    from transformers import AutoConfig, AutoTokenizer, Qwen2Config

    Qwen2Config(vocab_size=task.VOCABULARY_SIZE).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "qwen2"
    # as TRL and vLLM load it, beside a model's config
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for one in (tokenizer, loaded):
        ids = one("123+456=9750<end>")["input_ids"]
        # digits from 2, plus 12, equals 13, end 1
        assert ids == [3, 4, 5, 12, 6, 7, 8, 13, 11, 9, 7, 2, 1]
        assert one.decode(ids) == "123+456=9750<end>"
        assert one.decode(ids, skip_special_tokens=True) == "123+456=9750"
        assert len(one) == task.VOCABULARY_SIZE
        assert (one.pad_token_id, one.eos_token_id) == (0, 1)


def test_splits_share_no_problem_in_either_order():
    assert task.Problem(123, 456).answer == "9750"  # 579, padded 0579, units first
    assert (
        task.sample_problems(20, seed=3)
        == task.sample_problems(20, seed=3)
        != task.sample_problems(20, seed=4)
    )
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
    assert task.exact_match(completion_ids=completions, answer_ids=[right] * 5, prompts=None) == [
        1.0,
        0,
        0,
        0,
        0,
    ]


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
    start, line = capsys.readouterr().out.splitlines()
    assert start.endswith("supervised training on right answers. Accuracy jumps near update 500.")
    assert re.search(r"  Warm start, update 1: accuracy 0\.\d+$", line)
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


def test_shortfall_names_both_figures():
    before, after = Measurement(0.47, 0.5, 0.5), Measurement(0.60, 0.7, 0.7)
    stated = "0.470 to 0.600, which is 25% of its errors corrected; the demo requires at least 40%"
    assert find_shortfall(before, after, 0.2) is None and stated in find_shortfall(
        before, after, 0.4
    )
