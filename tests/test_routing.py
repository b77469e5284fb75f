"""The experts that an engine chose against those that the policy chooses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import MIXTURES, tiny_mixture, tiny_model

from trl_qurl.rollout.checks.routing import routing_metrics

SEQUENCES = [list(range(5, 25)), list(range(60, 30, -1))]


def routing_of(model, tokens):
    """The choice of a family that takes the likeliest experts, from the router's own output."""
    with torch.no_grad():
        output = model.eval()(input_ids=torch.tensor([tokens]), output_router_logits=True)
    return {layer: logits.topk(2).indices.tolist() for layer, logits in enumerate(output.router_logits)}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
def test_choices_that_differ_are_counted(family):
    model = tiny_mixture(family)
    routed = [(tokens, routing_of(model, tokens)) for tokens in SEQUENCES]
    assert routing_metrics(model, routed) == {"sync/routing_disagreement": 0.0}
    same = [
        (tokens, {layer: [chosen[::-1] for chosen in rows] for layer, rows in routing.items()})
        for tokens, routing in routed
    ]
    assert routing_metrics(model, same) == {"sync/routing_disagreement": 0.0}  # a set has no order
    chosen = routed[0][1][1][3]
    chosen[0] = next(expert for expert in range(4) if expert not in chosen)
    assert routing_metrics(model, routed)["sync/routing_disagreement"] == pytest.approx(1 / 100)  # 50 tokens, 2 layers


def test_an_engine_may_tell_of_the_last_tokens_alone():
    model = tiny_mixture("mixtral").train()
    tokens = SEQUENCES[1]
    ends = {layer: rows[-4:] for layer, rows in routing_of(model, tokens).items()}
    assert routing_metrics(model.train(), [(tokens, ends)]) == {"sync/routing_disagreement": 0.0}
    assert model.training
    ends[0][0] = [expert for expert in range(4) if expert not in ends[0][0]]
    assert routing_metrics(model, [(tokens, ends)])["sync/routing_disagreement"] == pytest.approx(1 / 8)


@pytest.mark.parametrize("family", MIXTURES)
def test_every_family_tells_its_own_choice(family):
    """Against a choice that cannot be: with as many experts as the family takes, all of them the first."""
    model, tokens = tiny_mixture(family), SEQUENCES[0]
    taken = model.config.num_experts_per_tok
    everything = {layer: [[0] * taken] * len(tokens) for layer in range(2)}
    assert routing_metrics(model, [(tokens, everything)]) == {"sync/routing_disagreement": 1.0}


def test_nothing_is_said_where_nothing_is_known():
    model = tiny_mixture("mixtral")
    assert routing_metrics(model, []) == routing_metrics(model, [(SEQUENCES[0], {})]) == {}
    padded = {0: [[0, 1]] * 64}  # by a kernel that computes whole blocks
    assert routing_metrics(model, [(SEQUENCES[0], padded)]) == {}
    assert routing_metrics(tiny_model(), [(SEQUENCES[0], {0: [[0, 1]]})]) == {}


@pytest.mark.vllm
def test_what_vllm_itself_reports_is_taken():
    """With CUDA graphs, which call nothing back; vLLM's CPU build does not report."""
    from vllm.outputs import CompletionOutput

    from trl_qurl.rollout.engine.colocated import ColocatedEngine

    chosen = np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[2, 1], [0, 3]]], dtype=np.uint8)  # (tokens, layers, k)
    completion = CompletionOutput(0, "", [9], None, [{}], routed_experts=chosen)
    reports = SimpleNamespace(
        collective_rpc=lambda method, kwargs: [{}],  # of routers whose callback vLLM uses itself
        generate=lambda prompts, params, use_tqdm: [SimpleNamespace(outputs=[completion])],
    )
    routing = ColocatedEngine(reports).route([5, 6, 7])
    assert routing == {0: [[0, 1], [1, 2], [2, 1]], 1: [[2, 3], [3, 0], [0, 3]]}
