"""Are rollouts that a quantized copy drafts those of 16 bits?

    trl-qurl quantize MODEL DRAFTER --scheme int8
    python -m benchmarks.speculation MODEL DRAFTER -o speculation.json

vLLM samples answers to the questions of `trl-qurl mismatch` with 16-bit weights, without a drafter,
with one, and with one after a repair of what vLLM 0.32's CPU build does wrong: it spreads the
temperatures over the tokens of a batch in a copy, and divides by memory that nobody wrote. Each
engine has a process of its own.

Declared on 2026-11-29, before the run with a quantized drafter: exact drafting means that at
temperature 0 all tokens are equal but those where two logits nearly tie, and that at temperature 1
the KL from the policy is that of 16 bits within the intervals, with no log-probability that is NaN.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from trl_qurl.lab.evaluation.tasks import encode_prompts
from trl_qurl.lab.mismatch.engines import Answer, score
from trl_qurl.lab.mismatch.prompts import BUILT_IN, load_prompts
from trl_qurl.lab.mismatch.statistics import measure

ARMS = ("16 bits", "drafted", "drafted, repaired")
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


def sample(arm: str, model: str, drafter: str) -> dict[str, Any]:
    """Sample answers at both temperatures; return them and the share of drafts that were taken."""
    from vllm import LLM, SamplingParams
    from vllm.v1.sample import rejection_sampler

    if arm == ARMS[2]:
        rejection_sampler.expand_batch_to_tokens = spread
    speculation = None
    if arm != ARMS[0]:
        speculation = {
            "method": "draft_model",
            "model": drafter,
            "num_speculative_tokens": DRAFTED,
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
    found: dict[str, Any] = {}
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
    drafts = counts.get("vllm:spec_decode_num_draft_tokens")
    found["taken"] = counts["vllm:spec_decode_num_accepted_tokens"] / drafts if drafts else None
    return found


def compare(model: str, arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return figures by arm: the agreement with 16 bits, and the KL from the policy."""
    from trl_qurl.quantization.checkpoint import load_model

    policy = load_model(model)[0].float().eval()
    plain = [Answer(*answer) for answer in arms[ARMS[0]]["0.0"]]
    figures = {}
    for arm, found in arms.items():
        greedy = [Answer(*answer) for answer in found["0.0"]]
        same = [mine.tokens == theirs.tokens for mine, theirs in zip(greedy, plain, strict=True)]
        differences = [
            abs(mine - theirs)
            for one, other, is_same in zip(greedy, plain, same, strict=True)
            for mine, theirs in zip(one.logps, other.logps, strict=False)
            if is_same
        ]
        sampled = [Answer(*answer) for answer in found["1.0"]]
        logps = [logp for answer in sampled for logp in answer.logps]
        broken = sum(not math.isfinite(logp) for logp in logps) / len(logps)
        kl = None if broken else measure(list(score(policy, sampled))).kl_k3
        figures[arm] = {
            "answers": len(greedy),
            "equal_at_0": sum(same),
            "largest_difference_at_0": max(differences, default=None),
            "not_finite_at_1": broken,
            "kl": kl and [kl.value, kl.low, kl.high],
            "taken": found["taken"],
        }
    return figures


def main() -> None:
    """Run each arm in a process of its own, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("drafter", help="a checkpoint of the same model, in any format")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        args.output.write_text(json.dumps(sample(args.arm, args.model, args.drafter)))
        return
    arms = {}
    for arm in ARMS:
        part = args.output.with_suffix(".part")
        own = [sys.executable, "-m", "benchmarks.speculation", args.model, args.drafter]
        subprocess.run([*own, "--arm", arm, "-o", str(part)], check=True)
        arms[arm] = json.loads(part.read_text())
        part.unlink()
    figures = compare(args.model, arms)
    from benchmarks.provenance import provenance

    record = {"figures": figures, **provenance(torch.device("cpu"), measured="trl_qurl")}
    args.output.write_text(json.dumps(record, indent=2, default=str) + "\n")
    for arm, row in figures.items():
        print(arm, row)


if __name__ == "__main__":
    main()
