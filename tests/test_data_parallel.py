"""A server with several engines (`--data-parallel-size`): weights must reach each of them, not only
the first.

vLLM sends a call to its workers to all engines, but returns the answer of the first one only. An
error of any engine is returned.
"""

import os

import pytest
import requests
from conftest import vllm_server
from support.training import MOVED, SAME
from tiny import PROBE, save_tiny

from trl_qurl.rollout.engine.http import add_key

ENGINES = 2


def ask(server, headers=None, **settings):
    """The choices of the answer to the probe."""
    answer = requests.post(
        f"{server.url}/v1/completions",
        auth=add_key,
        headers=headers,
        json={"prompt": PROBE} | settings,
        timeout=60,
    )
    return answer.json()["choices"]


def logps_of(server, engine):
    """One engine's log-probabilities of the probe's tokens from the second on."""
    headers = {"X-data-parallel-rank": str(engine)}
    [choice] = ask(server, headers, max_tokens=1, prompt_logprobs=0)
    rows = choice["prompt_logprobs"][1:]
    logps = []
    for token, row in zip(PROBE[1:], rows, strict=True):
        logps.append(row[str(token)]["logprob"])
    return logps


# A plugin of vLLM, which loads it in every process. While the file `flag` exists, the second engine
# receives one scale doubled.
PLUGIN = """
from pathlib import Path


def register():
    from trl_qurl.rollout.engine import worker

    read, load = worker.read_tensors, worker.RolloutWorker.load_rollout_weights

    def read_tampered(path):
        for name, tensor in read(path):
            yield name, tensor * 2 if name == "model.layers.1.mlp.down_proj.weight_scale" else tensor

    def load_rollout_weights(self, *args, **kwargs):
        is_second = self.vllm_config.parallel_config.data_parallel_index == 1
        worker.read_tensors = read_tampered if is_second and Path({flag!r}).exists() else read
        return load(self, *args, **kwargs)

    worker.RolloutWorker.load_rollout_weights = load_rollout_weights
"""


@pytest.fixture
def tampering(tmp_path, monkeypatch):
    """The flag of `PLUGIN`, which servers find from here on."""
    flag = tmp_path / "flag"
    site = tmp_path / "site"
    (site / "tampering-1.dist-info").mkdir(parents=True)
    (site / "tampering.py").write_text(PLUGIN.format(flag=str(flag)))
    (site / "tampering-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tampering\nVersion: 1\n"
    )
    (site / "tampering-1.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ntampering = tampering:register\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    return flag


@pytest.mark.vllm
@pytest.mark.slow
def test_every_engine_of_a_server_gets_the_weights_and_is_checked(
    train, run_scenario, tampering, tmp_path
):
    save_tiny(tmp_path / "model")
    with vllm_server(
        tmp_path / "model", tmp_path, "--scheme", "int8", "--data-parallel-size", str(ENGINES)
    ) as server:
        start = [logps_of(server, engine) for engine in range(ENGINES)]
        config = {
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "sync_check_interval": 1,
        }
        [record] = train([tmp_path / "out", "--export", tmp_path / "trained", config])
        end = [logps_of(server, engine) for engine in range(ENGINES)]
        group = ask(server, n=16, max_tokens=8, ignore_eos=True, return_token_ids=True)
        assert len({str(choice["token_ids"]) for choice in group}) == 16, (
            "the engines sampled the same completions"
        )
        tampering.touch()
        different = (
            "SyncError: .* of 40 tensors, 1 different .first "
            "model.layers.1.mlp.down_proj.weight_scale"
        )
        with pytest.raises(AssertionError, match=different):
            train([tmp_path / "out", config])
    [fresh] = run_scenario("fresh_engine.py", tmp_path / "trained")
    assert record["probe_end"] == pytest.approx(fresh, abs=SAME)
    for engine in range(ENGINES):
        assert start[engine] != pytest.approx(end[engine], abs=MOVED)
        assert end[engine] == pytest.approx(fresh, abs=SAME), f"engine {engine} has other weights"
