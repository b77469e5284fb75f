"""What comes back after a stop is what was there: adapters, the critic, the reference, experts, the
rollout.
"""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES, MIXTURES, tiny_classifier, tiny_mixture, tiny_model
from tiny_vision import tiny_vision_model
from transformers import TrainerState

from trl_qurl.trainers.checks.resuming import check_loaded, check_resumed, complete_checkpoint
from trl_qurl.trainers.critic import STATE_DIRECTORY, Critic
from trl_qurl.trainers.resuming import load_policy


@pytest.fixture(scope="module")
def stops(run_scenario, tmp_path_factory):
    return run_scenario("stops.py", tmp_path_factory.mktemp("stops"))


def in_an_engine(function):
    return pytest.mark.vllm(pytest.mark.xdist_group("stops")(function))


@in_an_engine
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="equality to the last bit is claimed for the CPU only"
)
@pytest.mark.parametrize("case", ["own_adapter", "two_adapters", "experts", "moving_reference"])
def test_a_resumed_run_is_the_one_that_never_stopped(case, stops):
    record = stops[case]
    assert record["resumed"] == record["whole"]
    assert record["whole"]


@in_an_engine
def test_a_policy_gets_no_adapter_of_the_critic(stops):
    assert stops["two_adapters"]["adapters"] == ["default"]
    assert stops["own_adapter"]["adapters"] == ["default", "ref"]


@in_an_engine
def test_the_best_checkpoint_brings_its_critic(stops):
    assert stops["best"] == {"checkpoint-1": [True, True], "checkpoint-3": [False, False]}


@in_an_engine
def test_a_critic_resumes_without_its_optimizer(stops):
    assert stops["only_models"]["critic_is_loaded"]
    [said] = stops["only_models"]["said"]
    assert "optimizer.pt" in said
    assert "checkpoint-2" in said


@in_an_engine
def test_training_again_begins_with_a_new_rollout(stops):
    record = stops["interrupted"]
    assert record["begun"] == [0, 2, "Ctrl-C", 0, 2, 4]
    assert not any(record["not_logged"]), "no row averages over the rollout that was dropped"
    # no rollout was scored with newer weights than those that sampled it
    assert max(record["kl"]) < 0.01


# A policy and what it resumes from, without an engine
# ---------------------------------------------------------------


def with_adapters(seed):
    model = tiny_model()
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.add_adapter("ref", config)
    return adapted


def policy(name, seed):
    if name in MIXTURES:
        return tiny_mixture(name, seed=seed)
    if name in VISION:
        return tiny_vision_model(name, seed=seed)
    if name == "critic":
        return tiny_classifier(seed=seed)
    if name == "adapters":
        return with_adapters(seed)
    if name == "bfloat16":
        return tiny_model(dtype=torch.bfloat16, seed=seed)
    return tiny_model(name, seed=seed)


VISION = ("qwen2_5_vl", "gemma3")
POLICIES = (*FAMILIES, *MIXTURES, *VISION, "critic", "adapters", "bfloat16")


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_loaded_is_what_was_saved(name, tmp_path):
    """`load_policy` loads what transformers' loader would miss; else that loader has loaded a plain
    state.
    """
    saved = policy(name, 0)
    saved.save_pretrained(tmp_path)
    check_loaded("policy", saved, tmp_path)
    other = policy(name, 1)
    trainer = SimpleNamespace(model=other, accelerator=Accelerator(cpu=True))
    with pytest.raises(RuntimeError, match="policy"):
        check_resumed(trainer, tmp_path)
    is_loaded = load_policy(other, tmp_path)
    assert is_loaded == (name not in (*FAMILIES, "gpt_oss", "critic", "bfloat16"))
    if is_loaded:
        check_resumed(trainer, tmp_path)


def test_a_value_that_differs_by_one_bit_is_named(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    value = model.model.norm.weight.data[3]
    value.copy_(torch.nextafter(value, torch.tensor(9.0)))
    with pytest.raises(RuntimeError, match="model.norm.weight"):
        check_loaded("policy", model, tmp_path)


def test_deepspeed_is_not_told_where_to_load_a_critic(tmp_path):
    """It refuses the argument. `test_processes.py` needs DeepSpeed."""
    critic = Critic.__new__(Critic)
    critic.accelerator = MagicMock(distributed_type=DistributedType.DEEPSPEED)
    (tmp_path / STATE_DIRECTORY).mkdir()
    critic.load_state(tmp_path)
    critic.accelerator.load_state.assert_called_once_with(str(tmp_path / STATE_DIRECTORY))


# Complete and incomplete checkpoints
# --------------------------------------------------------------------------------


def complete(path):
    path.mkdir(parents=True)
    TrainerState().save_to_json(str(path / "trainer_state.json"))


def test_a_resume_takes_the_last_complete_checkpoint_and_names_the_others(tmp_path, caplog):
    PartialState()  # for the logger
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match="checkpoint-1"):  # transformers' error
        complete_checkpoint(True, tmp_path)
    (tmp_path / "checkpoint-1").rmdir()
    for step in (2, 4, 10):
        complete(tmp_path / f"checkpoint-{step}")
    assert complete_checkpoint(True, tmp_path).name == "checkpoint-10"
    assert not caplog.text
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"epo')  # cut short
    (tmp_path / "checkpoint-12").mkdir()
    complete(tmp_path / "checkpoint-copy")
    assert complete_checkpoint(True, tmp_path).name == "checkpoint-4"
    assert "checkpoint-10, checkpoint-12." in caplog.text
    assert "checkpoint-2" not in caplog.text
    for name in ("checkpoint-10", "checkpoint-3"):
        with pytest.raises(FileNotFoundError, match=name):
            complete_checkpoint(tmp_path / name, tmp_path)
    assert complete_checkpoint(tmp_path / "checkpoint-2", "") == tmp_path / "checkpoint-2"
    assert complete_checkpoint(None, tmp_path) is complete_checkpoint(False, tmp_path) is None
