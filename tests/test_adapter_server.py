"""Adapters that are sent alone to a real `trl-qurl serve --enable-lora`."""

import pytest
from conftest import needs_avx512
from peft import LoraConfig
from support.deployment import at_step, history, interrupt, recoveries
from support.training import MOVED, SAME
from tiny import PROBE

pytestmark = [pytest.mark.vllm, needs_avx512, pytest.mark.xdist_group("adapter server")]


SERVER_OPTIONS = ("--scheme", "w4a16", "--enable-lora", "--max-lora-rank", "8")


@pytest.fixture
def trainer(deployment):
    """Makes trainers of an adapter that use the server."""

    def make(**settings):
        deployment.up()
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        defaults = {"rollout_quantization": "w4a16", "sync_check_interval": 1}
        return deployment.trainer(peft_config=lora, **defaults | settings)

    return make


def probe(trainer):
    answer = trainer.vllm_generation.vllm_client.get_sequence_logprobs([PROBE], [1], top_logprobs=1)
    return [logps[0] for logps in answer["actual_logprobs"][0]]


def largest_mismatch(trainer):
    return max(row["mismatch/kl_k3"] for row in trainer.state.log_history if "loss" in row)


def test_it_holds_the_trained_adapter(trainer, run_scenario, tmp_path):
    merged = trainer()
    beside = trainer(round_base=True)
    assert not merged.vllm_generation.sync.route.is_merged, (
        "auto sends an adapter to a server that takes one"
    )
    for number, run in enumerate((merged, beside)):
        run.vllm_generation.sync_weights()
        start = probe(run)
        run.train()
        run.vllm_generation.sync_weights()
        end = probe(run)
        run.save_quantized(tmp_path / str(number))
        [fresh] = run_scenario("fresh_engine.py", tmp_path / str(number))
        assert end == pytest.approx(fresh, abs=SAME)
        assert end != pytest.approx(start, abs=MOVED)
        rows = [row for row in run.state.log_history if "sync/sent_mb" in row]
        for row in rows:
            assert 0 < row["sync/sent_mb"] < 0.06
        assert rows[0]["time/sync_check_s"] > 0
    # With a rounded base both policies have the same weights.
    assert largest_mismatch(beside) < min(largest_mismatch(merged), 1e-4)


def test_a_server_that_restarts_gets_the_adapter_again(trainer, deployment, monkeypatch):
    undisturbed = trainer()
    undisturbed.train()
    disturbed = trainer(sync_check_interval=0)  # only the sync after the recovery is checked
    generation = disturbed.vllm_generation
    checked = []
    check = generation.vllm_client.check_base
    monkeypatch.setattr(
        generation.vllm_client, "check_base", lambda sent: checked.append(check(sent))
    )
    disturbed.add_callback(
        at_step(2, lambda: interrupt(generation, "generate", deployment.lose_and_wait))
    )
    disturbed.train()
    assert recoveries(disturbed) == 1
    assert len(checked) == 1
    assert history(disturbed) == history(undisturbed)
    assert generation.sync.route.engine.version() == generation.sync.version
