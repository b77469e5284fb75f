"""Log-probabilities of the probe under engines that have just been started from a checkpoint each.

A checkpoint with a subdirectory `adapter` is asked with that adapter. `CHECKPOINT@fp8` has a cache
in that format.
"""

import os
import sys
from pathlib import Path

from child import print_record

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from tiny import ENGINE, KEPT, PROBE
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform


def probe(argument):
    checkpoint, _, cache = argument.partition("@")
    settings = ENGINE | {"kv_cache_dtype": cache or "auto"}
    adapter = None
    path = Path(checkpoint, "adapter")
    if path.is_dir():
        if current_platform.is_cpu():
            import trl_qurl.rollout.repairs.cpu_adapters  # noqa: F401, registers the loader
        settings |= {"enable_lora": True, "max_lora_rank": 8, "load_format": "trl-qurl-cpu"}
        adapter = LoRARequest("saved", 1, str(path))
    engine = LLM(checkpoint, **settings, max_model_len=64, max_num_seqs=16)
    KEPT.append(engine)
    return answer(engine, lora_request=adapter)


def answer(engine, **options):
    """The log-probabilities of an engine."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompt = {"prompt_token_ids": PROBE}
    [output] = engine.generate([prompt], params, use_tqdm=False, **options)
    pairs = zip(PROBE[1:], output.prompt_logprobs[1:], strict=True)
    return [logps[token].logprob for token, logps in pairs]


if __name__ == "__main__":
    print_record([probe(checkpoint) for checkpoint in sys.argv[1:]])
