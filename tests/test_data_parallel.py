"""A server with several engines (`--data-parallel-size`): weights must reach each of them, not only the first.

vLLM sends a call to its workers to all engines, but returns the answer of the first one only.
"""

import json

import pytest
import requests
from conftest import vllm_server
from test_engine import MOVED, SAME
from tiny import PROBE, tiny_model, tiny_tokenizer

from trl_qurl.rollout.engine.key import ServerKey

ENGINES = 2


def logps_of(server, engine: int) -> list[float]:
    """One engine's log-probabilities of the probe's tokens from the second on."""
    answer = requests.post(
        f"{server.url}/v1/completions",
        auth=ServerKey(server.url),
        headers={"X-data-parallel-rank": str(engine)},
        json={"prompt": PROBE, "max_tokens": 1, "prompt_logprobs": 0},
        timeout=60,
    ).json()
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    return [row[str(token)]["logprob"] for token, row in zip(PROBE[1:], rows, strict=True)]


@pytest.mark.vllm
@pytest.mark.slow
def test_every_engine_of_a_server_gets_the_weights(train, run_scenario, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    with vllm_server(tmp_path / "model", tmp_path, "--scheme", "int8", "--data-parallel-size", str(ENGINES)) as server:
        start = [logps_of(server, engine) for engine in range(ENGINES)]
        config = {"vllm_mode": "server", "vllm_server_base_url": server.url, "sync_check_interval": 1}
        [record] = train([tmp_path / "out", "--export", tmp_path / "trained", "--config", json.dumps(config)])
        end = [logps_of(server, engine) for engine in range(ENGINES)]
    [fresh] = run_scenario("fresh_engine.py", tmp_path / "trained")
    assert record["probe_end"] == pytest.approx(fresh, abs=SAME)
    for engine in range(ENGINES):
        assert start[engine] != pytest.approx(end[engine], abs=MOVED)
        assert end[engine] == pytest.approx(fresh, abs=SAME), f"engine {engine} has other weights"
