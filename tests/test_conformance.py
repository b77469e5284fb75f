"""TRL's features through the doors that users take, and features.md, which says of each what it
does here.

Many features share a run (tests/scenarios/conformance.py), and several runs a process.
"""

import dataclasses
import inspect
import math
import os
import re
from pathlib import Path

import pytest
from accelerate.utils import ParallelismConfig
from conftest import DISTRIBUTED_VARIABLES, needs_vnni
from documents import ROOT, rows
from peft import LoraConfig
from support.building import STARTED, build, settings_of, start_no_engine
from tiny import tiny_model, tiny_tokenizer
from tiny_vision import vision_processor
from transformers import CompressedTensorsConfig, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation import vllm_generation

from trl_qurl import QuRLGRPOTrainer, QuRLPPOTrainer
from trl_qurl.quantization import write_checkpoint

TESTS = Path(__file__).parent
PAGE = ROOT / "tests" / "features.md"
VERDICTS = ("works", "refused", "TRL's limit", "not tried")

FEATURES = [row for row in rows(PAGE) if len(row) == 4]


# The page
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", FEATURES, ids=[row[0] for row in FEATURES])
def test_a_row_has_a_verdict_and_tests_that_exist(row):
    _, verdict, how, tests = row
    assert verdict in VERDICTS
    assert how
    shown = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
    if not shown:
        assert verdict == "not tried"
        assert tests == "–"
        assert "need" in how
    for file, name in shown:
        source = (TESTS / file).read_text()
        assert f"def {name}(" in source, f"{file} has no {name}"


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_every_setting_of_trl_is_on_the_page(config):
    named = set(re.findall(r"`(\w+)", "\n".join(row[0] for row in FEATURES)))
    transformers = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(config)} - transformers - {"use_vllm"}
    assert own - named == set()


# Runs
# --------------------------------------------------------------------------------------------------

SHARED = (
    "experts/mixtral",  # first: vLLM makes their groups with a process' first engine only
    "rewards",
    "sampling",
    "tools",
    "environment",
    "rollout_func",
    "rloo",
    "ppo",
    "adapter",
    "dense/smollm3",
    "dense/phi3",
    "vision/llava_next/again",
    "transformers_backend",
    "remote_code",
)
BACKEND = ["dense/olmo2", "dense/olmo3", "dense/starcoder2", "dense/vaultgemma"]
"""Families that vLLM runs by its transformers backend, beside SmolLM3."""
MODELS = [
    "experts/qwen3_moe",
    "experts/qwen2_moe",
    "experts/olmoe",
    "experts/glm4_moe",
    "dense/llama",
    "dense/qwen3",
    "dense/glm4",
    "dense/granite",
    "dense/cohere2",
    "vision/llava_next",
    "vision/gemma3",
    "vision/qwen2_vl",
    "vision/qwen2_5_vl",
    "vision/qwen3_vl",
    "vision/smolvlm",
    "vision/qwen2_5_vl/again",
    # LLaVA-NeXT also without pictures, with an adapter, and without groups' deviations
    "vision/llava_next/text",
    "vision/llava_next/lora",
    "vision/llava_next/RLOO",
    *BACKEND,
]
MODES = ("trained_adapter", "kernels")


def in_an_engine(function):
    """Mark a test that reads the record of a run."""
    return pytest.mark.vllm(pytest.mark.xdist_group("conformance")(function))


@pytest.fixture(scope="module")
def shared(run_scenario, tmp_path_factory):
    return run_scenario("conformance.py", tmp_path_factory.mktemp("shared"), *SHARED)


@pytest.fixture(scope="module")
def further(run_scenario, tmp_path_factory):
    others = ("reference", "environments")
    directory = tmp_path_factory.mktemp("further")
    return run_scenario("conformance.py", directory, *MODELS, *MODES, *others)


def trained(record, steps=2, mismatch=0.1):
    """The rows of a run's updates and rollouts, which learned from tokens of an engine that was in
    sync.
    """
    assert "error" not in record, record["error"]
    updates = [row for row in record["history"] if "grad_norm" in row]
    assert len(updates) == steps
    for row in updates:
        assert 0 < row["grad_norm"] < math.inf
    rollouts = [row for row in record["history"] if "reward" in row]
    assert rollouts
    for row in rollouts:
        assert row["time/sync_check_s"] > 0
        assert row["sync/sent_mb"] > 0
        assert 0 < row["mismatch/kl_k3"] < mismatch
    return updates, rollouts


@in_an_engine
def test_rewards_and_chats(shared):
    record = shared["rewards"]
    # Four updates of one rollout. A rollout draws from 9 of 97 tokens, so ln 11 is between the
    # policies.
    updates, [rollout] = trained(record, steps=4, mismatch=2)
    assert rollout["answers"] == 16, "log_metric"
    for name in ("right", "sometimes", "judge"):
        assert rollout[f"rewards/{name}/std"] > 0, name
    assert set(record["table"]["expected"]) <= {str(i) for i in range(16)}, "log_extra"
    assert record["asked"]["step"] > 0
    assert record["checkpointing"]
    assert [message["role"] for message in record["asked"]["prompt"]] == ["system", "user"]
    said = "".join(message["content"] for [message] in record["table"]["completion"])
    assert re.fullmatch("[/-6]+", said), "of generation_kwargs"
    kl = [row["kl"] > 0 for row in updates]
    assert kl == [False, True, True, True], "the first update starts at the reference"
    for row in updates:
        assert row["entropy"] > 0
    assert 0 < rollout["completions/clipped_ratio"] < 1, "nothing was truncated, or everything"


@in_an_engine
@pytest.mark.parametrize("name", ["rewards", "rloo", "tools"])
def test_an_evaluation_asks_in_the_words_of_training_and_greedily(shared, name):
    evaluated = shared[name]["evaluated"]
    assert evaluated["asked"]["prompts"] == evaluated["trained_on"]
    assert evaluated["asked"]["settings"] == {
        "temperature": 0,
        "repetition_penalty": 1,
        "structured_outputs_regex": None,
        "generation_kwargs": {"stop": ["b"]},
    }
    assert evaluated["restored"]


@in_an_engine
def test_logs(shared):
    record = shared["rewards"]
    assert record["steps"] == 4, "a callback counts steps"
    evaluated = [row["step"] for row in record["history"] if "eval_mismatch/kl_k3" in row]
    assert evaluated == [2, 4]
    table = record["table"]
    assert {"prompt", "completion", "advantage", "right", "sometimes", "expected"} <= table.keys()
    assert len(table["prompt"]) == 16, "a rollout"


@in_an_engine
def test_sampling(shared):
    record = shared["sampling"]
    # Ten of 99 tokens are digits. Over all of them, a ratio would be a tenth.
    _, [rollout] = trained(record, mismatch=3)
    assert rollout["mismatch/ratio_mean"] == pytest.approx(1.0, abs=0.02)
    assert len(record["said"]) == 16
    for text in record["said"]:
        assert re.fullmatch("[0-9]{3,8}", text)


@in_an_engine
def test_tools(shared):
    record = shared["tools"]
    _, [rollout] = trained(record, mismatch=5)  # within a grammar
    assert rollout["tools/call_frequency"] == 1
    assert rollout["tools/failure_frequency"] == 0
    call, answer, again = record["said"]
    [function] = [call["function"] for call in call["tool_calls"]]
    first = function["arguments"]["first"]
    second = function["arguments"]["second"]
    results = {"add": str(first + second), "look_up": f"nothing of {first}"}
    name = function["name"]
    assert answer == {"role": "tool", "name": name, "content": results[name]}
    assert again["role"] == "assistant"


@in_an_engine
def test_an_environment(shared):
    _, [rollout] = trained(shared["environment"], mismatch=5)  # within a grammar
    assert rollout["tools/call_frequency"] == 1
    assert rollout["reward"] == rollout["rewards/Calculator/mean"] > 0


@in_an_engine
def test_a_rollout_function(shared):
    _, [rollout] = trained(shared["rollout_func"], mismatch=1e-3)
    assert rollout["rewards/judge/mean"] > 8, "the function's own field is missing"


@in_an_engine
@pytest.mark.parametrize(("name", "mismatch"), [("rloo", 2), ("ppo", 1e-3)])
def test_rloo_and_ppo(name, mismatch, shared):
    record = shared[name]
    updates, [rollout] = trained(record, mismatch=mismatch)
    right = rollout["rewards/right/mean"]
    length = rollout["rewards/length/mean"]
    assert rollout["reward"] == pytest.approx(right + 0.5 * length, abs=1e-5)
    assert any("eval_reward" in row for row in record["history"])
    if name == "ppo":
        assert updates[-1]["kl"] > 0
    else:
        assert "kl" in rollout
        assert record["steps"] == 2


@in_an_engine
@needs_vnni
def test_an_adapter_with_a_penalty(shared):
    record = shared["adapter"]
    updates, _ = trained(record, mismatch=1e-3)
    assert updates[0]["kl"] > 0, "a random adapter differs from the model below it"
    assert record["drifted"] == [], "a sync or a probe wrote to the base"
    # TRL's count of steps says that the engine has these weights
    trained({"history": record["again"]}, mismatch=1e-3)
    assert record["changed"]["eval_mismatch/kl_k3"] < 1e-3, (
        "the engine answered from other weights than the policy's"
    )
    assert not record["synced_for_nothing"]


@pytest.mark.slow
@in_an_engine
def test_several_environments(further):
    _, [rollout] = trained(further["environments"], mismatch=5)  # within a grammar
    for kind in ("Calculator", "Other"):
        assert rollout[f"rewards/{kind}/mean"] > 0, kind


@in_an_engine
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("experts/mixtral", marks=needs_vnni),
        "dense/phi3",
        "vision/llava_next/again",
        *(pytest.param(name, marks=pytest.mark.slow) for name in (*MODELS, *MODES)),
    ],
)
def test_models_and_modes(name, request):
    if name.startswith("vision"):
        pytest.importorskip("torchvision", reason="transformers' processors need torchvision")
    if "smolvlm" in name:
        pytest.importorskip("num2words", reason="the processor needs num2words")
    run = "shared" if name in SHARED else "further"
    record = request.getfixturevalue(run)[name]
    # Large updates between two rollouts of the same pictures: features that the engine has cached
    # would show.
    steps = 4 if name.endswith("again") else 2
    mismatch = 0.1 if name in BACKEND else 1e-3
    trained(record, steps, mismatch)


@pytest.mark.slow
@in_an_engine
def test_a_reference_model_follows(further):
    trained(further["reference"], mismatch=1e-3)
    assert further["reference"]["follows"]


@in_an_engine
@pytest.mark.parametrize("name", ["dense/smollm3", "transformers_backend"])
def test_vllms_transformers_backend(name, shared):
    trained(shared[name])


@in_an_engine
def test_code_of_a_checkpoint(shared):
    trained(shared["remote_code"])
    assert shared["remote_code"]["files"] == ["configuration_own.py", "modeling_own.py"]


# Refusals
# --------------------------------------------------------------------------------------------------


REFUSED = {
    "auto_find_batch_size is not supported": {"auto_find_batch_size": True},
    "sequence-dim parallelism": {"parallelism_config": ParallelismConfig(cp_size=2)},
    "sync_ref_model=True.*beta=0.0": {"sync_ref_model": True, "beta": 0.0},
}


def test_trl_refuses_it_too(tmp_path, monkeypatch):
    def refuse(named, trainer=GRPOTrainer, **given):
        with pytest.raises((TypeError, ValueError), match=named):
            args = settings_of(trainer, tmp_path, **REFUSED.get(named, {}))
            build(trainer, tmp_path, args=args, **given)

    for named in REFUSED:
        refuse(named)
    untied = tiny_model(tie_word_embeddings=False)
    of_the_head = LoraConfig(target_modules=["lm_head"])
    refuse("`lm_head` is not supported", model=untied, peft_config=of_the_head)
    for name in ("tools", "environment_factory", "rollout_func"):
        refuse(f"unexpected .*{name}", RLOOTrainer, **{name: []})
    monkeypatch.setattr(GRPOConfig, "n_gpu", 2)
    refuse("nn.DataParallel")


def test_trl_reads_these_only_without_vllm():
    unread = "ds3_gather|cache_implementation|continuous_batching"
    assert not re.search(unread, inspect.getsource(vllm_generation))


@pytest.mark.vllm
@pytest.mark.parametrize("chosen", ["", "23457"])
def test_colocated_runs_take_free_ports_and_leave_no_launchers_variables(
    chosen, tmp_path, monkeypatch
):
    ports = []

    def start(**arguments):
        ports.append(os.environ["MASTER_PORT"])
        raise InterruptedError

    monkeypatch.setattr(vllm_generation, "LLM", start)
    monkeypatch.setenv("MASTER_PORT", chosen)
    before = dict(os.environ)
    with pytest.raises(InterruptedError):
        build(QuRLGRPOTrainer, tmp_path)
    assert ports == ["0"]  # any that is free when vLLM binds it
    left = {name for name in DISTRIBUTED_VARIABLES if os.environ.get(name) != before.get(name)}
    assert not left, "the next trainer would take them for a launcher's"


def test_no_critic_sees(tmp_path):
    tiny_model().save_pretrained(tmp_path / "policy")
    images = vision_processor("llava_next")
    with pytest.raises(ValueError, match="LlavaNextProcessor, but the critic .* QuRLGRPOTrainer"):
        build(QuRLPPOTrainer, tmp_path, model=f"{tmp_path}/policy", processing_class=images)


def test_a_model_that_is_loaded_quantized_is_refused(tmp_path, monkeypatch):
    """However it is loaded: here from a checkpoint that is quantized."""
    monkeypatch.setattr(
        "trl_qurl.rollout.backend.QuantizedVLLMGeneration._init_vllm", start_no_engine
    )
    model = f"{tmp_path}/model"
    write_checkpoint(tiny_model(), tiny_tokenizer(), "int8", model)
    with pytest.raises(ValueError, match=r"/model, is quantized.*16 bits.*round_base=True"):
        build(QuRLGRPOTrainer, tmp_path, model=model)
    as_sixteen_bits = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    with pytest.raises(AssertionError, match=STARTED):
        build(QuRLGRPOTrainer, tmp_path, model=model, **as_sixteen_bits)
