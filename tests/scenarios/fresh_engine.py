"""Log-probabilities of the probe under an engine that has just been started from a checkpoint."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).parent))

from train import PROBE
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    engine = LLM(sys.argv[1], enforce_eager=True, max_model_len=64, max_num_seqs=16)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = engine.generate([{"prompt_token_ids": PROBE}], params, use_tqdm=False)
    logps = [logps[token].logprob for token, logps in zip(PROBE[1:], output.prompt_logprobs[1:], strict=True)]
    print("RECORD " + json.dumps(logps))
