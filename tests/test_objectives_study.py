"""The study of objectives: its coarse quantizers, what a run records, and its statistics."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from benchmarks import real_model_exploration
from benchmarks.objectives import contrasts, exploration, study, summary
from benchmarks.objectives.centering import centering_term
from benchmarks.objectives.coarse import CODE_BITS, add_coarse_schemes, round_activations
from benchmarks.objectives.in_flight import update_in_flight, versions_of
from benchmarks.objectives.one_run import LORA
from benchmarks.objectives.recorder import BothPolicies
from benchmarks.real_model import COARSE, EXPLORING
from trl_qurl.lab.demo import evaluate, task, warm_start
from trl_qurl.lab.runs import Run
from trl_qurl.quantization.formats import SCHEMES, get_scheme
from trl_qurl.rollout.results import Completions

WEIGHT = torch.randn(16, 400, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "bits"), CODE_BITS.items())
def test_the_number_of_bits_of_coarse_codes(name, bits, monkeypatch):
    # restored after the test
    monkeypatch.setattr("trl_qurl.quantization.formats.SCHEMES", dict(SCHEMES))
    add_coarse_schemes()
    scheme = get_scheme(name)
    rounded = scheme.quantize(WEIGHT)
    scale = rounded["weight_scale"]
    codes = rounded["weight"]
    assert codes.dtype == torch.int8
    assert len(codes.unique()) == 2**bits
    # The largest code stands for absmax less half a step, as with INT8, which is the largest error.
    absmax = WEIGHT.abs().amax(1, keepdim=True)
    torch.testing.assert_close(scale, absmax / (2 ** (bits - 1) - 0.5))
    error = (scheme.dequantize(rounded) - WEIGHT).abs()
    assert (error <= scale / 2 + 1e-6).all()


def test_activations_of_four_bits():
    step = WEIGHT.abs().amax(-1, keepdim=True) / 7
    codes = round_activations(WEIGHT, bits=4) / step
    torch.testing.assert_close(codes.round(), codes, atol=1e-4, rtol=0)
    assert all(len(row.unique()) <= 15 for row in codes.round())


def test_no_study_of_int8_trains_where_its_sums_saturate(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    with pytest.raises(SystemExit, match="no VNNI"):
        study.main(["main", "--arms", "int8_tis", "--output", "nowhere"])


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "beside the base"])
def test_the_quantized_policy_is_measured_with_its_adapter_and_stays_as_it_was(merges):
    tokenizer = task.build_tokenizer()
    torch.manual_seed(0)  # for the adapter
    lora = LoraConfig(**LORA, init_lora_weights=False)
    policy = get_peft_model(warm_start.build_model(tokenizer, seed=0), lora)
    problems = task.encode_problems(task.sample_problems(32, seed=0), tokenizer)
    scheme = SCHEMES["w4a16"]  # rounds weights only
    rounded = copy.deepcopy(policy)
    if merges:
        rounded = rounded.merge_and_unload()
    for name, module in rounded.named_modules():
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and "lm_head" not in name:
            codes = scheme.quantize(module.weight.data)
            module.weight.data = scheme.dequantize(codes)
    expected = evaluate.measure_policy(rounded, problems).expected
    base = policy.get_base_model()
    forward = base.forward
    # TRL replaces it too, and a copy still calls this model
    base.forward = lambda **inputs: forward(**inputs)
    row = BothPolicies(scheme, merges, problem_ids=problems, rollouts=1).measure(policy)
    assert row["quantized_expected_accuracy"] == pytest.approx(expected, rel=1e-5, abs=0)
    unrounded = evaluate.measure_policy(policy, problems).expected
    assert row["expected_accuracy"] == unrounded
    assert unrounded != pytest.approx(expected, rel=1e-4, abs=0)


def test_arms_are_paired_by_seed_except_those_with_other_seeds():
    arms = {"bf16_again": {0: 8.0, 1: 12.0}, "bf16": {0: 1.0, 1: 3.0}, "tis": {1: 4.0, 2: 0.0}}
    assert summary.samples_of(arms, "tis", "bf16", float) == ([1.0], [])
    # variances 8 and 2: the standard error is √5
    two = summary.samples_of(arms, "bf16_again", "bf16", float)
    assert summary.stated(*two) == pytest.approx([8.0, 4.303 * math.sqrt(5)])


LARGEST = """\
| difference | seeds | mean | p | Holm's p | leaves out zero with windows of |
| --- | --- | --- | --- | --- | --- |
| INT3: quantized_ratio − naive | 5 | **-0.474 ± 0.098** | 0.00018 | 0.005 | 10, 20, 30, 40, 60 |
| INT4: quantized_ratio − naive | 3 | **-0.090 ± 0.014** | 0.00136 | 0.035 | 10, 20, 30, 40, 60 |
| INT3: naive − BF16 | 5 | **-0.055 ± 0.040** | 0.01895 | 0.474 | 10, 20, 30, 40, 60 |"""


def test_the_logs_leave_the_two_differences_that_the_page_names():
    """By Holm's correction of all differences, of which the clearest are shown."""
    found = [*contrasts.Study().table().values()]
    assert contrasts.table_of(found, only_below=0.02) == LARGEST


def test_the_tables_of_exploration_are_those_of_the_page(capsys):
    exploration.main([])
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    page = (study.RESULTS.parents[1] / "study.md").read_text(encoding="utf-8")
    assert len(rows) == 2 * 8
    assert [row for row in rows if row not in page] == []
    assert "of 48 differences" in printed
    real_model_exploration.main([])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 9
    assert [row for row in rows if row not in page] == []


JUDGED = {
    "INT4, naive − 16 bits": ["entropy, 1-20"],
    "INT4, naive, then tis − 16 bits": ["accuracy, full precision"],
    "INT4, naive, then tis − INT4, tis": ["accuracy, full precision"],
}


@pytest.mark.parametrize(("seeds", "bold"), [(8, {}), (9, JUDGED)])
def test_differences_of_the_real_model_are_judged_once_all_declared_seeds_ran(seeds, bold):
    """Two arms have more of everything; only what was declared is judged."""
    arms = {}
    for arm in ("bf16", *(f"{bits}_{name}" for bits in COARSE for name in EXPLORING)):
        gain = 0.1 if arm in ("int4_naive", "int4_naive_then_tis") else 0.0
        for seed in range(3 if arm.startswith("int4") else seeds):
            value = 0.5 + gain + 0.01 * math.sin(seed * len(arm))
            row = dict.fromkeys(("entropy", "reward", "mismatch/kl_k3"), value)
            run = Run(Path(arm), {"full_precision": value}, [row] * 40)
            arms.setdefault(arm, {})[seed] = run
    lines = real_model_exploration.table(arms).splitlines()
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    found = {}
    for row in rows:
        clear = [title for title, cell in zip(head, row, strict=True) if "**" in cell]
        if clear:
            found[row[0]] = clear
    assert found == bold


@pytest.mark.parametrize("objective", ["naive", "tis"])
def test_centering_takes_away_what_the_sampler_adds_on_average(objective):
    """With all tokens listed, the term's gradient is that of the surrogate without an advantage, on
    average over what the actor samples.
    """
    model = tiny_model()
    torch.manual_seed(0)
    ids = torch.randint(2, 90, (2, 4))
    q = torch.randn(2, 3, 100).mul(2).softmax(-1)
    inputs = {
        "prompt_ids": ids[:, :1],
        "completion_ids": ids[:, 1:],
        "prompt_mask": torch.ones(2, 1),
        "completion_mask": torch.ones(2, 3),
        "likeliest_ids": torch.arange(100).expand(2, 3, 100),
        "likeliest_logps": q.log(),
    }
    trainer = MagicMock(temperature=0.7)
    trainer.accelerator.unwrap_model.return_value = model
    trainer.args = SimpleNamespace(objective=objective, importance_cap=2.0)
    logps = (model(ids).logits[:, :-1] / 0.7).log_softmax(-1)
    weight = 1.0
    if objective == "tis":
        weight = (logps.detach().exp() / q).clamp(max=2.0)
    average = (q * weight * logps).sum()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(average, parameters, retain_graph=True)
    found = torch.autograd.grad(centering_term(trainer, inputs).sum(), parameters)
    largest = max(gradient.abs().max().item() for gradient in expected)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * largest)


def test_each_token_is_sampled_by_the_weights_of_its_time():
    assert versions_of(5, 16) == [(0, 1), (3, 1), (6, 1), (9, 1), (12, 1)]
    assert versions_of(8, 2) == [(0, 4), (1, 4)]
    policy = torch.nn.Linear(1, 1, bias=False)
    trainer = MagicMock(model=policy)
    trainer.processing_class.eos_token_id = 12
    generation = trainer.vllm_generation
    generation.max_completion_length = 8
    engine = []

    def answer(prompts):
        """As many tokens as asked for, each the weight that the engine has; 12 ends an answer."""
        count = generation.max_completion_length
        tokens = [int(engine[-1])] * count
        logprobs = [[-1.0]] * count
        answers = len(prompts)
        return Completions(prompts, [tokens] * answers, [logprobs] * answers, None)

    generation.generate_from_sent = answer
    generation.sync_weights = lambda: engine.append(policy.weight.item())
    update_in_flight(trainer, 2)
    trainer.add_callback.assert_called_once()
    [callback] = trainer.add_callback.call_args.args
    sampled = []
    for weight in (10.0, 11.0, 12.0, 13.0, 14.0):  # a step each, before three a rollout
        policy.weight.data.fill_(weight)
        callback.on_step_begin(None, None, None, model=policy)
        if weight in (10.0, 12.0, 14.0):
            sampled.append(generation.generate(prompts=[[5], [6]]))
    assert [rollout.completion_ids for rollout in sampled] == [
        [[10] * 8] * 2,  # no update precedes it
        [[10] * 4 + [11] * 4] * 2,
        [[12] * 4] * 2,  # ended, so nothing follows
    ]
    assert sampled[1].logprobs == [[[-1.0]] * 8] * 2
    assert sampled[1].prompt_ids == [[5], [6]]
    assert policy.weight.item() == 14.0
    assert generation.max_completion_length == 8
