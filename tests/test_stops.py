"""What comes back after a stop is what was there: adapters, the critic, the reference, experts, the
rollout.
"""

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from support.disks import mounted
from tiny import FAMILIES, MIXTURES, tiny_classifier, tiny_mixture, tiny_model
from tiny_vision import tiny_vision_model
from transformers import TrainerState, TrainingArguments

from trl_qurl.trainers.checkpoints import CheckpointsMixin
from trl_qurl.trainers.critic import STATE_DIRECTORY, Critic
from trl_qurl.trainers.resuming import (
    check_complete,
    check_loaded,
    check_split_weights,
    is_complete,
    last_complete_checkpoint,
    load_policy,
    read_whole,
    written_whole,
)


@pytest.fixture(scope="module")
def stops(run_scenario, tmp_path_factory):
    [records] = run_scenario("stops.py", tmp_path_factory.mktemp("stops"))
    return records


engines = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("stops"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="equality to the last bit is claimed for the CPU only"
    ),
]


@pytest.mark.parametrize(
    "case", ["own_adapter", "two_adapters", "experts", "moving_reference", "preempted"]
)
@pytest.mark.usefixtures("stops")
class TestResumedRuns:
    pytestmark = engines

    def test_a_resumed_run_is_the_one_that_never_stopped(self, case, stops):
        record = stops[case]
        assert record["resumed"] == record["whole"] and record["whole"]


@pytest.mark.vllm
@pytest.mark.xdist_group("stops")
class TestOtherStops:
    def test_a_policy_gets_no_adapter_of_the_critic(self, stops):
        assert stops["two_adapters"]["adapters"] == ["default"]
        assert stops["own_adapter"]["adapters"] == ["default", "ref"]

    def test_a_checkpoint_inside_a_step_waits_for_its_end(self, stops):
        assert stops["preempted"]["checkpoints"] == ["checkpoint-3"]

    def test_the_best_checkpoint_brings_its_critic(self, stops):
        assert stops["best"] == {"checkpoint-1": [True, True], "checkpoint-3": [False, False]}

    def test_a_critic_resumes_without_its_optimizer(self, stops):
        assert stops["preempted"]["critic_without_optimizer"]
        [said] = stops["preempted"]["said"]
        assert "optimizer.pt" in said and "checkpoint-2" in said

    def test_training_again_begins_with_a_new_rollout(self, stops):
        record = stops["interrupted"]
        assert record["begun"] == [0, 2, "Ctrl-C", 0, 2, 4]
        assert not any(record["not_logged"]), "no row averages over the rollout that was dropped"
        assert max(record["kl"]) < 0.01, (
            "no rollout was scored with newer weights than those that sampled it"
        )


# A policy and what it resumes from, without an engine
# ---------------------------------------------------------------


def with_adapters(seed: int):
    model = tiny_model()
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.add_adapter("ref", config)
    return adapted


POLICIES = {
    **{family: lambda seed, family=family: tiny_model(family, seed=seed) for family in FAMILIES},
    **{family: lambda seed, family=family: tiny_mixture(family, seed=seed) for family in MIXTURES},
    **{
        family: lambda seed, family=family: tiny_vision_model(family, seed=seed)
        for family in ("qwen2_5_vl", "gemma3")
    },
    "critic": lambda seed: tiny_classifier(seed=seed),
    "adapters": with_adapters,
    "bfloat16": lambda seed: tiny_model(dtype=torch.bfloat16, seed=seed),
}


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_loaded_is_what_was_saved(name, tmp_path):
    """`load_policy` loads what transformers' loader would miss; else that loader has loaded a plain
    state.
    """
    make = POLICIES[name]
    saved = make(0)
    saved.save_pretrained(tmp_path)
    check_loaded("policy", saved, tmp_path)
    other = make(1)
    with pytest.raises(RuntimeError, match="policy"):
        check_loaded("policy", other, tmp_path)
    if load_policy(other, tmp_path):
        check_loaded("policy", other, tmp_path)
    else:
        assert name in (*FAMILIES, "gpt_oss", "critic", "bfloat16")


def test_a_loader_of_other_files_does_not_hide_a_wrong_adapter(tmp_path):
    """The check without the repair: transformers loads `ref` and leaves the policy's own adapter as
    it was.
    """
    with_adapters(0).save_pretrained(tmp_path)
    resumed = with_adapters(1)
    resumed.load_adapter(str(tmp_path / "ref"), "ref")
    with pytest.raises(RuntimeError, match="'default'"):
        check_loaded("policy", resumed, tmp_path)


def test_a_value_that_differs_by_one_bit_is_named(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nextafter(model.model.norm.weight[3], torch.tensor(9.0))
    with pytest.raises(RuntimeError, match="model.norm.weight"):
        check_loaded("policy", model, tmp_path)


def test_deepspeed_is_not_told_where_to_load_a_critic(tmp_path):
    """It refuses the argument. `test_processes.py` needs DeepSpeed."""
    loaded = []

    class DeepSpeed:
        distributed_type = DistributedType.DEEPSPEED

        def load_state(self, path):
            loaded.append(path)

    critic = Critic.__new__(Critic)
    critic.accelerator = DeepSpeed()
    (tmp_path / STATE_DIRECTORY).mkdir()
    critic.load_state(tmp_path)
    assert loaded == [str(tmp_path / STATE_DIRECTORY)]


# Complete and incomplete checkpoints
# --------------------------------------------------------------------------------


def complete(path):
    path.mkdir(parents=True)
    TrainerState().save_to_json(str(path / "trainer_state.json"))


def test_a_resume_takes_the_last_complete_checkpoint_and_names_the_others(tmp_path, caplog):
    PartialState()  # for the logger
    for step in (2, 4, 10):
        complete(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"epo')  # cut short
    (tmp_path / "checkpoint-12").mkdir()
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-4"
    assert (
        "checkpoint-10" in caplog.text
        and "checkpoint-12" in caplog.text
        and "checkpoint-2" not in caplog.text
    )
    with pytest.raises(FileNotFoundError, match="checkpoint-10"):
        check_complete(tmp_path / "checkpoint-10")
    with pytest.raises(FileNotFoundError, match="checkpoint-3"):
        check_complete(tmp_path / "checkpoint-3")
    assert check_complete(tmp_path / "checkpoint-2") == tmp_path / "checkpoint-2"


def test_fsdp_does_not_resume_from_a_model_alone(tmp_path):
    class UnderFSDP(CheckpointsMixin):
        is_fsdp_enabled = True
        args = TrainingArguments(str(tmp_path))

    for step in (1, 2):
        complete(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-1" / "pytorch_model_fsdp_0").mkdir()
    for given in (True, tmp_path / "checkpoint-2"):
        with pytest.raises(FileNotFoundError, match="checkpoint-2 has no .* save_only_model=True"):
            UnderFSDP().train(given)
    check_split_weights(tmp_path / "checkpoint-1")


def test_without_a_complete_checkpoint_the_directory_is_named(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match="checkpoint-1"):  # transformers' error
        last_complete_checkpoint(tmp_path)


def test_a_full_disk_leaves_no_checkpoint(tmp_path):
    with mounted(tmp_path / "disk", "size=64k") as disk:
        complete(disk / "checkpoint-2")
        full = disk / "checkpoint-4"
        with pytest.raises(OSError, match="output_dir"), written_whole(full, is_owner=True):
            full.mkdir()
            torch.save({"batches": torch.zeros(100_000)}, full / "rollout_state_0.pt")
        assert not full.exists() and is_complete(disk / "checkpoint-2")


def test_a_failed_upload_leaves_a_complete_checkpoint(tmp_path):
    checkpoint = tmp_path / "checkpoint-2"
    with pytest.raises(ConnectionError, match="the Hub"), written_whole(checkpoint, is_owner=True):
        complete(checkpoint)
        raise ConnectionError("the Hub does not answer")
    assert is_complete(checkpoint)


def test_a_checkpoint_that_is_written_again_is_incomplete_until_its_end(tmp_path):
    checkpoint = tmp_path / "checkpoint-2"
    complete(checkpoint)
    with written_whole(checkpoint, is_owner=True):
        assert not is_complete(checkpoint)


def test_a_damaged_file_is_named_by_its_checkpoint(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    torch.save({"a": torch.zeros(1000)}, tmp_path / "optimizer.pt")
    for name in ("model.safetensors", "optimizer.pt"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:1000])
    readers = (
        lambda: load_file(tmp_path / "model.safetensors"),
        lambda: torch.load(tmp_path / "optimizer.pt"),
    )
    for read in readers:
        with pytest.raises(OSError, match=str(tmp_path)), read_whole(tmp_path):
            read()
    with pytest.raises(RuntimeError, match="out of memory"), read_whole(tmp_path):
        raise RuntimeError("out of memory")


def test_another_error_leaves_the_files(tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"), written_whole(tmp_path, is_owner=True):
        raise RuntimeError("out of memory")
    assert tmp_path.exists()
