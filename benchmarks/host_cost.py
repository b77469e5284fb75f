"""What a token costs the trainer's process between vLLM's engine and padded tensors.

    python benchmarks/host_cost.py TOKENIZER_DIRECTORY -o benchmarks/results/host_cost.json

No model runs. Made-up results of an engine go through vLLM's output processor, then through the
reading of log-probabilities and whatever turns them into padded tensors. The time is that of one
thread (`time.thread_time`), in microseconds a token: the least of the repetitions, because other
processes can only add to it. The arms are TRL's way, the same without text, and trl-qurl's; the
last two rows list what `top_k=20` needs.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
from provenance import provenance
from transformers import AutoTokenizer
from trl.generation.vllm_generation import extract_logprobs
from trl.trainer.utils import pad
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists

from trl_qurl.rollout.samples import read_outputs, sampling_arguments
from trl_qurl.trainers.listed_tokens import TIES, list_tokens

ANSWERS, TOKENS = 64, 512
REPETITIONS = 5
TOP_K = 20 + TIES
ARMS: dict[str, tuple[bool, dict[str, Any]]] = {  # whether trl-qurl reads it, and its arguments
    "TRL": (False, {}),
    "TRL, no text": (False, {"detokenize": False}),
    "trl-qurl": (True, sampling_arguments({})),
    "TRL, no text, top_k": (False, {"detokenize": False, "logprobs": TOP_K}),
    "trl-qurl, top_k": (True, sampling_arguments({"logprobs": TOP_K})),
}


def process(tokenizer: Any, ids: np.ndarray, arguments: dict[str, Any]) -> tuple[float, list]:
    """Return the seconds of vLLM's output processor for these tokens, and its outputs."""
    processor = OutputProcessor(tokenizer, log_stats=False)
    settings = {
        "max_tokens": TOKENS,
        "logprobs": 0,
        "ignore_eos": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    } | arguments
    for number in range(ANSWERS):
        name, params = str(number), SamplingParams(**settings)
        request = EngineCoreRequest(
            name, [5] * 32, None, params, None, 0.0, None, None, None, external_req_id=name
        )
        processor.add_request(request, "prompt")
    listed = settings["logprobs"] + 1
    logps = np.full((1, listed), -3.0, np.float32)
    rank = np.ones(1, np.int32)
    spent, outputs = 0.0, []
    for step, row in enumerate(ids):
        reason = FinishReason.LENGTH if step == TOKENS - 1 else None
        results = []
        for number, token in enumerate(row):
            # the sampled token, then the likeliest, of which it is one
            found = LogprobsLists(
                np.array([[token, *range(token, token + listed - 1)]]), logps, rank
            )
            results.append(EngineCoreOutput(str(number), [int(token)], found, finish_reason=reason))
        started = time.thread_time()
        outputs += processor.process_outputs(results).request_outputs
        spent += time.thread_time() - started
    return spent, outputs


def read_as_trl(outputs: list) -> torch.Tensor:
    """Do what TRL's backend and GRPO trainer do up to `sampling_per_token_logps`, (B, T)."""
    listed, _ = extract_logprobs(outputs)
    sampled = [[token[0] for token in row] for row in listed]
    rows = [
        torch.tensor([float("nan") if logp is None else logp for logp in row]) for row in sampled
    ]
    return pad(rows)


def read_as_ours(outputs: list, is_listed: bool) -> torch.Tensor:
    """Do the same as trl-qurl's backend and TRL's trainer after it."""
    listings, _ = read_outputs(outputs)
    lists = [(each.logps[:, :1].tolist(), each.ids[:, :1].tolist()) for each in listings]
    sampled = [[token[0] for token in row] for row, _ in lists]
    if is_listed:
        list_tokens(listings, TOKENS, torch.device("cpu"))
    return pad([torch.tensor(row) for row in sampled])


def measure(tokenizer: Any, is_ours: bool, arguments: dict[str, Any]) -> dict[str, float]:
    """Return microseconds a token, by part."""
    ids = np.random.default_rng(0).integers(100, len(tokenizer) - 100, (TOKENS, ANSWERS))
    spent, outputs = process(tokenizer, ids, arguments)
    outputs.sort(key=lambda output: int(output.request_id))
    started = time.thread_time()
    if is_ours:
        read_as_ours(outputs, "logprobs" in arguments)
    else:
        read_as_trl(outputs)
    reading = time.thread_time() - started
    per_token = 1e6 / ids.size
    return {"processor_us": spent * per_token, "reading_us": reading * per_token}


def main() -> None:
    """Measure the arms in turns, and print and store the least of each part."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tokenizer", help="directory of a tokenizer")
    parser.add_argument("-o", "--output", type=Path, help="file for the results")
    args = parser.parse_args()
    results = provenance(torch.device("cpu"), "trl_qurl/rollout/samples.py")
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for _ in range(REPETITIONS):
        for name, arm in ARMS.items():
            rows[name].append(measure(tokenizer, *arm))
    print(f"{ANSWERS} answers of {TOKENS} tokens, vocabulary of {len(tokenizer)}; us a token")
    results |= {"answers": ANSWERS, "tokens": TOKENS, "vocabulary": len(tokenizer), "arms": {}}
    for name, found in rows.items():
        least = {part: min(row[part] for row in found) for part in found[0]}
        results["arms"][name] = least
        processor, reading = least.values()
        print(f"{name:20} {processor:5.1f} + {reading:4.1f} = {processor + reading:5.1f}")
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
