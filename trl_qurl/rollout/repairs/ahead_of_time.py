"""What vLLM compiles ahead of time on a CPU is never loaded (report 14).

Without that, torch's own cache shortens the next start. With it, every start compiles.
"""

import os

REPORTS = (14,)
SEEN_IN = "vllm 0.32"
UNNECESSARY_FROM = None

VARIABLE = "VLLM_USE_AOT_COMPILE"  # vLLM's


def environment() -> dict[str, str]:
    """Return the variable that an engine on a CPU needs, unless the user has set it."""
    if VARIABLE in os.environ:
        return {}
    return {VARIABLE: "0"}
