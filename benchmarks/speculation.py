"""Are rollouts that a quantized copy drafts those of 16 bits?

    trl-qurl quantize MODEL DRAFTER --scheme int8
    python -m benchmarks.speculation MODEL DRAFTER -o speculation.json

vLLM samples answers to the questions of `trl-qurl mismatch` with 16-bit weights, without a drafter,
with one, and with one after a repair of what vLLM 0.32's CPU build does wrong: it spreads the
temperatures over the tokens of a batch in a copy, and divides by memory that nobody wrote. By
default the drafter proposes its likeliest token; the last engine samples from it. Each engine has a
process of its own.

Declared on 2026-11-29, before the run with a quantized drafter: exact drafting means that at
temperature 0 all tokens are equal but those where two logits nearly tie, and that at temperature 1
the KL from the policy is that of 16 bits within the intervals, with no log-probability that is NaN.
The engine that samples its drafts was added later that day, with the same expectation.
"""

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from trl_qurl.lab.evaluation.tasks import encode_prompts
from trl_qurl.lab.mismatch.engines import Answer, all_logps, score
from trl_qurl.lab.mismatch.prompts import BUILT_IN, load_prompts
from trl_qurl.lab.mismatch.statistics import measure
from trl_qurl.lab.processes import call_in_child

ARMS = ("16 bits", "drafted", "drafted, repaired", "drafts sampled, repaired")
COUNTED = ("draft_tokens", "accepted_tokens")
TOKENS = 64
DRAFTED = 3  # tokens at a time


def spread(
    x: torch.Tensor, ends: torch.Tensor, count: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each sequence's value for its tokens, as vLLM's `expand_batch_to_tokens` should.

    Args:
        x: A value per sequence, (B,).
        ends: Number of tokens up to and including each sequence, (B,).
        count: Of all tokens, N.
        replace_from: A value to be replaced.
        replace_to: By what.

    Returns:
        A value per token, (N,).
    """
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)).long())


def answer_of(prompt: list[int], output: Any) -> Answer:
    """Return a completion of vLLM's."""
    tokens = list(output.token_ids)
    steps = zip(tokens, output.logprobs, strict=True)
    return Answer(prompt, tokens, [candidates[token].logprob for token, candidates in steps])


def sample(model: str, drafter: str, arm: str) -> dict[str, Any]:
    """Return answers by temperature, and how many tokens were drafted and taken by then."""
    from vllm import LLM, SamplingParams
    from vllm.v1.sample import rejection_sampler

    if "repaired" in arm:
        rejection_sampler.expand_batch_to_tokens = spread
    speculation = None
    if arm != ARMS[0]:
        speculation = {
            "method": "draft_model",
            "model": drafter,
            "num_speculative_tokens": DRAFTED,
            "draft_sample_method": "probabilistic" if arm == ARMS[3] else "greedy",
        }
    prompts, length = encode_prompts(model, load_prompts(None, len(BUILT_IN)), TOKENS)
    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=length + DRAFTED + 1,
        max_num_seqs=len(prompts),
        enforce_eager=True,
        kv_cache_memory_bytes=2**30,
        logprobs_mode="processed_logprobs",
        disable_log_stats=False,
        speculative_config=speculation,
        seed=0,
    )
    found: dict[str, Any] = {"counts": []}
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, max_tokens=TOKENS, logprobs=0, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [output.outputs[0] for output in llm.generate(asked, params, use_tqdm=False)]
        found[str(temperature)] = [
            answer_of(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)
        ]
        counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        found["counts"].append([counts.get(f"vllm:spec_decode_num_{name}", 0) for name in COUNTED])
    return found


def gap(policy: PreTrainedModel, one: Answer, other: Answer) -> float:
    """Return how far the policy holds two answers' first different tokens apart, in nats."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    first = next(step for step, (mine, theirs) in enumerate(pairs) if mine != theirs)
    logps = all_logps(policy, one)[first]
    return abs(float(logps[one.tokens[first]] - logps[other.tokens[first]]))


def compare(model: str, arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return figures by arm: the agreement with 16 bits, and the KL from the policy."""
    from trl_qurl.quantization.checkpoint import load_model

    policy = load_model(model)[0].float().eval()
    plain = arms[ARMS[0]]["0.0"]
    figures = {}
    for arm, found in arms.items():
        greedy = found["0.0"]
        same = [mine.tokens == theirs.tokens for mine, theirs in zip(greedy, plain, strict=True)]
        differences = [
            abs(mine - theirs)
            for one, other, is_same in zip(greedy, plain, same, strict=True)
            for mine, theirs in zip(one.logps, other.logps, strict=False)
            if is_same
        ]
        sampled = found["1.0"]
        logps = [logp for answer in sampled for logp in answer.logps]
        broken = sum(not math.isfinite(logp) for logp in logps) / len(logps)
        (drafted_at_0, taken_at_0), (drafted, taken) = found["counts"]
        kl = None if broken else measure(list(score(policy, sampled))).kl_k3
        figures[arm] = {
            "answers": len(greedy),
            "equal_at_0": sum(same),
            "largest_difference_at_0": max(differences, default=None),
            "gaps_of_unequal": sorted(
                gap(policy, one, other)
                for one, other, is_same in zip(greedy, plain, same, strict=True)
                if not is_same
            ),
            "not_finite_at_1": broken,
            "kl": kl and [kl.value, kl.low, kl.high],
            "taken_at_0": taken_at_0 / drafted_at_0 if drafted_at_0 else None,
            "taken_at_1": (taken - taken_at_0) / (drafted - drafted_at_0) if drafted else None,
        }
    return figures


def main() -> None:
    """Run each arm in a process of its own, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("drafter", help="a checkpoint of the same model, in any format")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    from benchmarks.provenance import provenance

    # Under this name, not that of the script, another process finds the function.
    from benchmarks.speculation import sample

    answer = partial(sample, args.model, args.drafter)
    arms = {arm: call_in_child(answer, arm, f"{arm} failed") for arm in ARMS}
    figures = compare(args.model, arms)
    record = {"figures": figures, **provenance(torch.device("cpu"), measured="trl_qurl")}
    args.output.write_text(json.dumps(record, indent=2, default=str) + "\n")
    for arm, row in figures.items():
        print(arm, row)


if __name__ == "__main__":
    main()
