"""Log-probabilities of the probe under engines that have just been started, each from a checkpoint of its own."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import ENGINE, KEPT, PROBE
from vllm import LLM, SamplingParams


def probe(checkpoint: str) -> list[float]:
    engine = LLM(checkpoint, **ENGINE, max_model_len=64, max_num_seqs=16)
    KEPT.append(engine)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = engine.generate([{"prompt_token_ids": PROBE}], params, use_tqdm=False)
    return [logps[token].logprob for token, logps in zip(PROBE[1:], output.prompt_logprobs[1:], strict=True)]


if __name__ == "__main__":
    print("RECORD " + json.dumps([probe(checkpoint) for checkpoint in sys.argv[1:]]))
